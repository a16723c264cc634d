"""Say what is wrong with one value: pydantic's errors, in words for a user."""

from __future__ import annotations

from typing import Any

from plugins.nearest import nearest

# pydantic's error types -> what is allowed, filled with the error's context
_ALLOWED = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "literal_error": "must be {expected}",
    "bool_type": "must be true or false",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be a block of keys and values",
    "too_short": "needs at least {min_length} item(s)",
    "string_too_short": "must not be empty",
}


def text_of(error: Any) -> str:
    """Return what is wrong with a value and what is allowed, for one entry of `ValidationError.errors()`."""
    kind, given, context = error["type"], error["input"], error.get("ctx") or {}
    if kind in ("value_error", "rule"):
        return str(error["msg"]).removeprefix("Value error, ")
    if kind == "invalid_key":
        return "keys are text; put quotes around it"
    if kind == "missing":
        return "is missing"
    way_out = ""
    if kind == "int_type":
        allowed = "must be a whole number"
        way_out = f"; write {int(given)}" if isinstance(given, float) and given.is_integer() else ""
    elif kind == "string_type":
        allowed = "must be text"
        way_out = "" if given is None or isinstance(given, list | dict) else "; put quotes around it"
    else:
        allowed = _ALLOWED[kind].format(**context) if kind in _ALLOWED else error["msg"]
    if kind == "literal_error" and isinstance(given, str):
        choices = [part.strip("' ") for part in context["expected"].replace(" or ", ",").split(",")]
        guess = nearest(given, choices)
        way_out = f"; did you mean {guess}?" if guess else ""
    return f"{allowed}; given {shown(given)}{way_out}"


def shown(value: Any) -> str:
    """Return a value as the user wrote it, shortened."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
