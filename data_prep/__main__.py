"""Make data files in our layout: `python -m data_prep` lists the recipes, `python -m data_prep NAME --help` one."""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import pkgutil
import shlex
import sys
from pathlib import Path
from typing import Any

import data_prep
from data_prep import recipes
from plugins.nearest import hint

COMMAND = "python -m data_prep"
# Where a result goes and how it is replaced is no part of what it is.
PLACE_OPTIONS = ("out", "force")


def names() -> list[str]:
    """Return the names of all recipes, which are the modules in data_prep/recipes/."""
    return sorted(module.name for module in pkgutil.iter_modules(recipes.__path__))


def listing() -> str:
    """Return a text with one line for each recipe, and the commands that make models."""
    folder = Path(data_prep.__path__[0])
    lines = ["Data files, each made by `python -m data_prep NAME --out FOLDER` (--help says more):", ""]
    lines += [f"  {name:<18} {_summary(folder / 'recipes' / f'{name}.py')}" for name in names()]
    lines += ["", "Models, each made by a command of its own:", ""]
    lines += [f"  data_prep.{name:<18} {_summary(folder / f'{name}.py')}" for name in ("smollm2", "tiny_sorter_model")]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, or 2 after one line on what is wrong."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(listing())
        return 0
    name, own = arguments[0], arguments[1:]
    try:
        if name not in names():
            raise ValueError(f"there is no recipe '{name}'; {hint(name, names())}")
        _run(name, own)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(name: str, arguments: list[str]) -> None:
    from data_prep.preparing import Order, prepare

    recipe: Any = importlib.import_module(f"data_prep.recipes.{name}")
    parser = argparse.ArgumentParser(
        prog=f"{COMMAND} {name}", description=recipe.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    recipe.arguments(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder to make")
    parser.add_argument("--strict", action="store_true", help="stop at the first bad row instead of leaving it out")
    parser.add_argument("--force", action="store_true", help="replace what an earlier command made")
    options = parser.parse_args(arguments)
    plan = recipe.plan(options)
    shown = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items() if k not in PLACE_OPTIONS}
    prepare(
        Order(
            recipe=name,
            out=options.out,
            options=shown,
            command=f"{COMMAND} {shlex.join([name, *arguments])}",
            source=getattr(options, "source", None),
            test_fraction=getattr(options, "test_fraction", 0.0),
            strict=options.strict,
            force=options.force,
        ),
        plan,
    )


def _summary(path: Path) -> str:
    """Return the first line of a module's docstring, read without running the module."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert text, f"{path} has no docstring"
    return text.split("\n", 1)[0]


if __name__ == "__main__":
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # one line a file is ours to print
    sys.exit(main())
