"""The `algorithm:` block: from a method's own `Params` to checked values, and from those to the method.

Nothing is registered anywhere: a file in algs/ or a dotted path is a method, and its `Params` are its keys.
"""

from __future__ import annotations

import ast
import dataclasses
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plugins.parameters import error_at, model_of_method

if TYPE_CHECKING:
    from algs.method import PolicyMethod
    from configs.blocks.rl import Algorithm

ALGS = Path(__file__).resolve().parent.parent / "algs"


@dataclasses.dataclass(frozen=True)
class Listed:
    """What a reader of algs/ sees of a method without importing it."""

    summary: str  # first line of the class docstring
    has_advantages: bool  # without one it cannot learn from rewards


@cache
def listed() -> dict[str, Listed]:
    """The methods in algs/ by name. Reads the files' syntax only: importing them would load torch."""
    classes = {}  # class name -> (file stem, class)
    for file in sorted(ALGS.glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name] = (file.stem, node)

    def ancestry(name: str) -> list[ast.ClassDef]:
        """The class and its ancestors in algs/, up to but without PolicyMethod; empty when it is no method."""
        if name not in classes:
            return []
        node = classes[name][1]
        bases = [base.id if isinstance(base, ast.Name) else getattr(base, "attr", "") for base in node.bases]
        if "PolicyMethod" in bases:
            return [node]
        above = [found for base in bases for found in ancestry(base)]
        return [node, *above] if above else []

    found = {}
    for name, (stem, node) in classes.items():
        if lineage := ancestry(name):
            functions = {item.name for cls in lineage for item in cls.body if isinstance(item, ast.FunctionDef)}
            doc = ast.get_docstring(node) or ""
            found[stem] = Listed(doc.partition("\n")[0].strip(), "advantages" in functions)
    return found


def find(name: str) -> type[PolicyMethod]:
    """The method a config names.

    Raises:
        ValueError: it does not import or is none; the message names the nearest method in algs/.
    """
    from plugins.nearest import nearest
    from plugins.objective_parts import find_method

    try:
        return find_method(name)
    except ValueError as error:
        suggestion = nearest(name, list(listed()))
        hint = f"did you mean {suggestion}?" if suggestion else f"methods in algs/: {', '.join(listed())}"
        raise ValueError(f"{error}; {hint}") from error


def has_advantages(method: type[PolicyMethod]) -> bool:
    from algs.method import PolicyMethod

    return method.advantages is not PolicyMethod.advantages


def built(algorithm: Algorithm) -> PolicyMethod:
    """The method with its parameters.

    Raises:
        ValueError: the method refuses the parameters together.
    """
    method = find(algorithm.name)
    return method(method.Params(**algorithm.params))


def checked_params(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The method's parameters with defaults filled in.

    Raises:
        ValidationError: located at `name` when the method is not found, else at the wrong parameters.
    """
    try:
        method = find(name)
    except ValueError as error:
        raise error_at("name", str(error), name) from error
    values = model_of_method(method).model_validate(given).model_dump()
    try:
        method.Params(**values)
    except ValueError as error:  # a rule of the method's own that spans its parameters
        raise error_at("name", f"{name}: {error}", name) from error
    return values
