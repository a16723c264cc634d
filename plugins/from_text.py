"""A method from the text of a command line."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

import algs
from algs.method import PolicyMethod
from plugins.objective_parts import find_method

SIGNS = {"ge": (">=", float.__ge__), "gt": (">", float.__gt__), "le": ("<=", float.__le__), "lt": ("<", float.__lt__)}


YAML_WORDS = {"true": True, "false": False, "null": None}


def yaml_word(value: object) -> str:
    """A value as YAML has it: true, null, 0.0003."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def built(name: str, given: Sequence[str] = ()) -> PolicyMethod:
    """A method with its parameters, `given` as "clip_high=0.28" each.

    Raises:
        ValueError: there is no such method or parameter (with the nearest names), or the value is refused.
    """
    try:
        cls = find_method(name)
    except ValueError as error:
        near = difflib.get_close_matches(name, methods(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(methods())}"
        raise ValueError(f"{error}; {hint}") from error
    params: Any = cls.Params
    fields = {field.name: field for field in dataclasses.fields(params)}
    kinds, values = get_type_hints(params), {}
    for item in given:
        key, equals, text = item.partition("=")
        if not equals or key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {near[0]}?" if near else f"its parameters: {', '.join(fields) or 'none'}"
            raise ValueError(f"--set {item}: {name} has no parameter '{key}'; {hint}")
        values[key] = _value(text, kinds[key], fields[key].metadata, f"--set {item}")
    return cls(params(**values))


def _value(text: str, hint: Any, bounds: Mapping[str, Any], what: str) -> object:
    """The value that the text means in YAML, if the parameter's type and bounds allow it."""
    value: object = text
    if text in YAML_WORDS:
        value = YAML_WORDS[text]
    elif re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text):
        value = ast.literal_eval(text)
    choices = _choices(hint)
    kinds = [type(choice) for choice in choices] or list(get_args(hint)) or [hint]
    fits = type(value) in kinds or (type(value) is int and float in kinds)
    if (choices and value not in choices) or not fits:
        allowed = map(yaml_word, choices) if choices else (getattr(kind, "__name__", str(kind)) for kind in kinds)
        raise ValueError(f"{what}: must be {' or '.join(allowed)}")
    for key, (sign, holds) in SIGNS.items():
        if key in bounds and isinstance(value, int | float) and not holds(float(value), float(bounds[key])):
            raise ValueError(f"{what}: must be {sign} {bounds[key]:g}")
    return value


def _choices(hint: Any) -> tuple[object, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


def methods() -> list[str]:
    """Names of the methods in algs/."""
    found = []
    for entry in pkgutil.iter_modules(algs.__path__):
        if entry.name not in ("method", "explain"):
            module = importlib.import_module(f"algs.{entry.name}")
            own = (value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__)
            if any(inspect.isclass(value) and issubclass(value, PolicyMethod) for value in own):
                found.append(entry.name)
    return found
