"""Find the code that a configuration names: a table of the kinds of plug-ins, and the list of our own of each kind.

Nothing is registered. Our own are listed by reading the syntax of their files, so that `--help` imports no torch. A
user's own is `module:name` for every kind.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from plugins.nearest import hint

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Kind:
    """A kind of plug-in: where our own are, and what each is (a class with `base` or `methods`, else a function)."""

    home: str  # a package with one file for each, or (where `takes` is given) one module with all of them
    base: str = ""  # class that it must inherit from
    methods: tuple[str, ...] = ()  # methods that it must have
    takes: str = ""  # class that its first parameter must be annotated with

    @property
    def must_be(self) -> str:
        if self.base:
            return f"a class that inherits from {self.base}"
        if self.methods:
            return f"a class with the methods {' and '.join(self.methods)}"
        return f"a function whose first parameter is annotated as {self.takes}" if self.takes else "a function"


KINDS = {
    "method": Kind("algs", base="algs.method.PolicyMethod"),
    "advantage": Kind("algs.advantages", takes="algs.records.Groups"),
    "correction": Kind("algs.corrections", takes="algs.records.PolicyTokens"),
    "reward": Kind("rewards"),
    "filter": Kind("rollouts.filters"),
    "environment": Kind("rollouts.environments", methods=("reset", "step")),
}
_TWO = "reinforce_plus_plus (or reinforce_plus_plus_baseline, which was group_baseline: true)"
RENAMED = {
    ("method", "soft_clip"): "sapo", ("method", "reinforce_pp"): _TWO, ("advantage", "reinforce_pp"): _TWO,
}  # fmt: skip


@dataclass(frozen=True)
class Listed:
    """One of our own plug-ins, as the syntax of its file shows it."""

    module: str
    attribute: str
    summary: str  # first line of the docstring
    methods: frozenset[str]  # defined by a class, or by those of ours that it inherits from

    @property
    def has_advantages(self) -> bool:
        """Return whether a method can learn from rewards."""
        return "advantages" in self.methods


def find(kind: str, name: str) -> Any:
    """Return the class or function of a configured name: one of ours (`grpo`), or a user's own (`my_lab.parts:mine`).

    Raises:
        ValueError: there is none of that name (the nearest one is named), its module does not import, or it is of
            another kind.
    """
    what = f"{kind} '{name}'"
    module_name, colon, attribute = name.partition(":")
    if not colon:
        if (kind, name) in RENAMED:
            raise ValueError(f"{what} is now called {RENAMED[kind, name]}")
        if "." in name:
            own = ":".join(name.rpartition(".")[::2])
            raise ValueError(f"{what}: your own is named module:name; did you mean {own}?")
        if name not in listed(kind):
            way_out = hint(name, listed(kind)).replace("there are:", "your own is named module:name, and ours are:")
            raise ValueError(f"{what}: there is no {kind} of that name; {way_out}")
        module_name, attribute = listed(kind)[name].module, listed(kind)[name].attribute
    module = _imported(module_name, what)
    if not hasattr(module, attribute):
        fitting = [n for n, value in vars(module).items() if not n.startswith("_") and _fits(KINDS[kind], value)]
        raise ValueError(f"{what}: {module_name} has no {kind} called '{attribute}'; {hint(attribute, fitting)}")
    found = getattr(module, attribute)
    if not _fits(KINDS[kind], found):
        raise ValueError(f"{what}: {module_name}.{attribute} must be {KINDS[kind].must_be}")
    return found


def labels(names: Sequence[str]) -> list[str]:
    """Return short names for logs, unique in the list: the function's name, numbered from its second use on."""
    short = [name.rpartition(":")[2] for name in names]
    earlier = [short[:i].count(name) for i, name in enumerate(short)]
    return [f"{name}#{n + 1}" if n else name for name, n in zip(short, earlier, strict=True)]


@cache
def listed(kind: str) -> dict[str, Listed]:
    """Return our own plug-ins of a kind by name, in the order of their files, or of their places in the one file."""
    row = KINDS[kind]
    definitions = _definitions(row.home)
    base = row.base.rpartition(".")[2]
    classes = {n.name: n for _, n in definitions if isinstance(n, ast.ClassDef) and n.name != base}
    found = {}
    for module, node in definitions:
        lineage = _lineage(node, classes)
        methods = {item.name for cls in lineage for item in cls.body if isinstance(item, Definition)}
        if _is_one(row, module, node, lineage, methods):
            name = node.name if row.takes else module.rpartition(".")[2]
            assert name not in found, f"{module} defines more than one {kind}"
            summary = (ast.get_docstring(node) or "").partition("\n")[0].strip()
            found[name] = Listed(module, node.name, summary, frozenset(methods))
    return found


def _definitions(home: str) -> list[tuple[str, Definition]]:
    """Return (module, syntax) of what the files of a package, or one module, define at their top level."""
    spec = importlib.util.find_spec(home)
    assert spec is not None and spec.origin is not None
    is_package = spec.submodule_search_locations is not None
    files = sorted(Path(spec.origin).parent.glob("*.py")) if is_package else [Path(spec.origin)]
    return [
        (f"{home}.{file.stem}" if is_package else home, node)
        for file in files
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, Definition) and not node.name.startswith("_")
    ]


def _lineage(node: Definition, classes: dict[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """Return a class and those of our own classes that it inherits from; an empty list for a function."""
    if not isinstance(node, ast.ClassDef):
        return []
    bases = [classes[name] for base in node.bases if (name := ast.unparse(base).rpartition(".")[2]) in classes]
    return [node, *(ancestor for base in bases for ancestor in _lineage(base, classes))]


def _is_one(row: Kind, module: str, node: Definition, lineage: list[ast.ClassDef], methods: set[str]) -> bool:
    """Return whether a definition's syntax is that of a plug-in of a kind."""
    if row.base:
        bases = {ast.unparse(base).rpartition(".")[2] for cls in lineage for base in cls.bases}
        return row.base.rpartition(".")[2] in bases
    if row.methods:
        return methods.issuperset(row.methods)
    if row.takes:
        first = None if isinstance(node, ast.ClassDef) else next(iter(node.args.args), None)
        return first is not None and ast.unparse(first.annotation or first) == row.takes.rpartition(".")[2]
    return not isinstance(node, ast.ClassDef) and node.name == module.rpartition(".")[2]


def _fits(row: Kind, value: Any) -> bool:
    """Return whether an object is what a kind demands."""
    if row.base:
        module, _, name = row.base.rpartition(".")
        base = getattr(importlib.import_module(module), name)
        return inspect.isclass(value) and issubclass(value, base) and value is not base
    if row.methods:
        return inspect.isclass(value) and all(callable(getattr(value, name, None)) for name in row.methods)
    if not row.takes:
        return callable(value)
    first = next(iter(inspect.signature(value).parameters.values()), None) if inspect.isfunction(value) else None
    annotation = "" if first is None else first.annotation  # a text, where annotations are not evaluated
    name = annotation.strip("'\"") if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return name.rpartition(".")[2] == row.takes.rpartition(".")[2]


def _imported(name: str, what: str) -> ModuleType:
    """Return the module, or raise a ValueError that says whether the module is missing or fails."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ValueError(
                f"{what}: there is no module {error.name}; it must be importable from the folder the run starts in (or "
                "through PYTHONPATH)"
            ) from error
        raise ValueError(f"{what}: {name} does not import: {error}") from error
    except Exception as error:  # a user's file may fail in any way while it is imported
        where = f" (line {error.lineno} of {error.filename})" if isinstance(error, SyntaxError) else ""
        raise ValueError(f"{what}: {name} does not import: {type(error).__name__}: {error}{where}") from error
