"""How a name in the config becomes a method, an advantage or a correction: one of ours, or a user's by dotted path."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, get_type_hints

from algs.method import PolicyMethod
from algs.records import Groups, PolicyTokens

Kind = Literal["advantage", "correction"]
HOMES: dict[str, tuple[str, type]] = {  # where ours are, and what such a function takes first
    "advantage": ("algs.advantages", Groups),
    "correction": ("algs.corrections", PolicyTokens),
}

NOT_OFFERED = ("varies",)  # takes Groups but says which carry a signal


def find_method(name: str) -> type[PolicyMethod]:
    """The method class a config names: `grpo` is the class in algs/grpo.py, `my_lab.my_loss:Mine` a user's own.

    Raises:
        ValueError: the module does not import, or holds no (or several) method classes; the message says which.
    """
    module_name, _, class_name = name.partition(":")
    if not class_name and "." not in module_name:
        module_name = f"algs.{module_name}"
    module = _imported(module_name, f"method '{name}'")
    if class_name:
        found = getattr(module, class_name, None)
        if not (inspect.isclass(found) and issubclass(found, PolicyMethod)):
            raise ValueError(f"method '{name}': {module_name} has no PolicyMethod called {class_name}")
        return found
    own = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, PolicyMethod) and value.__module__ == module.__name__
    ]
    if len(own) != 1:
        names = ", ".join(value.__name__ for value in own) or "none"
        raise ValueError(
            f"method '{name}': {module_name} must define one PolicyMethod, found {names}; use module:Class"
        )
    return own[0]


def find_function(kind: Kind, name: str) -> Callable[..., Any]:
    """The function a config names: `rloo` is the one in algs/advantages.py, `my_lab.parts:mine` a user's own.

    Raises:
        ValueError: there is none of that name (with the nearest), the module does not import, or the function's first
            parameter is not annotated as Groups (advantage) or PolicyTokens (correction).
    """
    home, record = HOMES[kind]
    module_name, colon, function_name = name.partition(":")
    if not colon and "." in name:
        module_name, _, function_name = name.rpartition(".")
        raise ValueError(f"{kind} '{name}': your own function is named module:function; {module_name}:{function_name}?")
    if not colon:
        module_name, function_name = home, name
    module = _imported(module_name, f"{kind} '{name}'")
    found = vars(module).get(function_name)
    if not inspect.isfunction(found) or (module_name == home and function_name not in functions(kind)):
        known = list(functions(kind) if module_name == home else functions_in(module, record))
        near = difflib.get_close_matches(function_name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known) or 'none'}"
        raise ValueError(f"{kind} '{name}': {module_name} has no {kind} called '{function_name}'; {hint}")
    if not _takes(found, record):
        raise ValueError(
            f"{kind} '{name}': its first parameter must be annotated as algs.records.{record.__name__}, as in "
            f"def {function_name}({'groups' if record is Groups else 't'}: {record.__name__})"
        )
    return found


def functions(kind: Kind) -> dict[str, Callable[..., Any]]:
    """Ours of a kind, by name, in the order of the file."""
    home, record = HOMES[kind]
    found = functions_in(importlib.import_module(home), record)
    return {name: function for name, function in found.items() if name not in NOT_OFFERED}


def functions_in(module: ModuleType, record: type) -> dict[str, Callable[..., Any]]:
    """The public functions that a module defines and whose first parameter is annotated as `record`."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
        and _takes(value, record)
    }


def _takes(function: Callable[..., Any], record: type) -> bool:
    first = next(iter(inspect.signature(function).parameters), None)
    return first is not None and hints(function).get(first) is record


def hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function's parameters, with what `knob` added to them.

    Raises:
        ValueError: an annotation names something that does not exist when the module runs.
    """
    try:
        return get_type_hints(function, include_extras=True)
    except NameError as error:
        where = f"{function.__module__}:{function.__name__}"
        raise ValueError(f"{where}: an annotation cannot be read: {error}; import it outside TYPE_CHECKING") from error


def _imported(module_name: str, what: str) -> ModuleType:
    """The module, or a ValueError that begins with `what` and tells a missing module from one that fails."""
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ValueError(f"{what}: {module_name} does not import: {error}") from error
        raise ValueError(f"{what}: there is no module {module_name}") from error
    except Exception as error:  # a user's file may fail in any way while it is imported
        where = f" (line {error.lineno} of {error.filename})" if isinstance(error, SyntaxError) else ""
        raise ValueError(f"{what}: does not import: {type(error).__name__}: {error}{where}") from error
