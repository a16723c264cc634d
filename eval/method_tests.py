"""Which tests prove a method: read off the syntax of unit_tests/, without running or importing anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A test parametrised over one of these, or over a list made of it, is one that every method passes: the list in
# unit_tests/algs/method_checks.py, and plugins.methods.listed().
EVERY_METHOD = {"NAMES", "listed"}


@dataclass(frozen=True)
class Test:
    """A test function."""

    path: str  # from the root
    says: str  # the first paragraph of its docstring, or its name in words
    every_method: bool
    from_rewards: bool  # of those only the ones that learn from rewards
    words: frozenset[str]  # texts in its body and its parameters: a method it speaks of is among them


@cache
def tests() -> tuple[Test, ...]:
    """Every test function of the files that test methods."""
    found: list[Test] = []
    for path in sorted((ROOT / "unit_tests").rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        if "method_checks" in source or "listed()" in source:
            found += _tests(ast.parse(source), str(path.relative_to(ROOT)))
    return tuple(found)


def own(name: str) -> list[Test]:
    """Those of the method's own file."""
    return [test for test in tests() if test.path == f"unit_tests/algs/test_{name}.py"]


def about(name: str) -> list[Test]:
    """Those elsewhere that speak of the method by name: identities with others, known traps, other libraries' losses."""
    return [t for t in tests() if name in t.words and not t.every_method and not _is_a_methods_own(t.path)]


def of_all(from_rewards: bool) -> list[Test]:
    """Those that run once for every method, or for every one that learns from rewards."""
    return [test for test in tests() if test.every_method and (from_rewards or not test.from_rewards)]


def _is_a_methods_own(path: str) -> bool:
    stem = Path(path).stem.removeprefix("test_")
    return (ROOT / "algs" / f"{stem}.py").is_file()


def _tests(module: ast.Module, path: str) -> Iterator[Test]:
    assigned = {
        target.id: node.value
        for node in reversed(module.body)  # the first assignment of a name wins
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            parameters = [item for decorator in node.decorator_list for item in _parametrised(decorator)]
            reached = _reached(parameters, assigned)
            says = (ast.get_docstring(node) or node.name.removeprefix("test_").replace("_", " ")).split("\n\n")[0]
            words = {
                inner.value
                for item in (*node.body, *reached)
                for inner in ast.walk(item)
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str)
            }
            names = {name for item in reached for name in _names(item)}
            is_of_all = bool(EVERY_METHOD & names)
            yield Test(path, " ".join(says.split()), is_of_all, "has_advantages" in names, frozenset(words))


def _reached(parameters: list[ast.expr], assigned: dict[str, ast.expr]) -> list[ast.expr]:
    """The parameters' values, and what the names in them stand for at the top of the file, and so on."""
    found: list[ast.expr] = []
    waiting = list(parameters)
    while waiting:
        item = waiting.pop()
        if item not in found:
            found.append(item)
            waiting += [assigned[name] for name in _names(item) if name in assigned]
    return found


def _names(item: ast.expr) -> set[str]:
    """Names and attributes in an expression."""
    inner = list(_unsliced(item))
    return {node.id for node in inner if isinstance(node, ast.Name)} | {
        node.attr for node in inner if isinstance(node, ast.Attribute)
    }


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
