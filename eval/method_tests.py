"""Which tests prove a method: read off the syntax of unit_tests/, without running or importing anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED = "method_checks"  # unit_tests/algs/method_checks.py: a file that imports from it tests methods
EVERY_METHOD = "NAMES"  # the list in there; a test parametrised over it is one that every method passes


@dataclass(frozen=True)
class Test:
    """A test function."""

    path: str  # from the root
    says: str  # the first paragraph of its docstring, or its name in words
    every_method: bool
    words: frozenset[str]  # texts in its body and its parameters: a method it speaks of is among them


@cache
def tests() -> tuple[Test, ...]:
    """Every test function of the files that test methods."""
    found: list[Test] = []
    for path in sorted((ROOT / "unit_tests").rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        if SHARED in source:
            found += _tests(ast.parse(source), str(path.relative_to(ROOT)))
    return tuple(found)


def own(name: str) -> list[Test]:
    """Those of the method's own file."""
    return [test for test in tests() if test.path == f"unit_tests/algs/test_{name}.py"]


def about(name: str) -> list[Test]:
    """Those elsewhere that speak of the method by name: identities with others, known traps, other libraries' losses."""
    return [t for t in tests() if name in t.words and not t.every_method and not _is_a_methods_own(t.path)]


def of_all() -> list[Test]:
    """Those that run once for every method."""
    return [test for test in tests() if test.every_method]


def _is_a_methods_own(path: str) -> bool:
    stem = Path(path).stem.removeprefix("test_")
    return (ROOT / "algs" / f"{stem}.py").is_file()


def _tests(module: ast.Module, path: str) -> Iterator[Test]:
    lists = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            parameters = [item for decorator in node.decorator_list for item in _parametrised(decorator)]
            names = {inner.id for item in parameters for inner in _unsliced(item) if isinstance(inner, ast.Name)}
            nodes: list[ast.AST] = [*node.body, *parameters, *(lists[name] for name in sorted(names) if name in lists)]
            says = (ast.get_docstring(node) or node.name.removeprefix("test_").replace("_", " ")).split("\n\n")[0]
            words = {
                inner.value
                for item in nodes
                for inner in ast.walk(item)
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str)
            }
            yield Test(path, " ".join(says.split()), EVERY_METHOD in names, frozenset(words))


def _parametrised(decorator: ast.expr) -> list[ast.expr]:
    """The values of a parametrize or given: their arguments, without the parameters' own names."""
    if not isinstance(decorator, ast.Call):
        return []
    is_parametrize = isinstance(decorator.func, ast.Attribute) and decorator.func.attr == "parametrize"
    return decorator.args[1:] if is_parametrize else [*decorator.args, *(word.value for word in decorator.keywords)]


def _unsliced(node: ast.AST) -> Iterator[ast.AST]:
    """The node and what is in it, without what is under an index: of `LOSSES[:2]` only a run knows what it holds."""
    if isinstance(node, ast.Subscript):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _unsliced(child)
