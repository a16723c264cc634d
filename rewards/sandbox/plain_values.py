"""Plain values as JSON, for two processes that do not trust each other: what is read is data and runs no code.

Both sides of rewards/sandbox/driver.py and tester.py use it in the sandbox, so it imports the standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, BinaryIO

COLLECTIONS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def packed(value: Any, other: Callable[[Any], dict[str, Any]]) -> Any:
    """Return a value in a form that JSON holds. `other` names what is no plain value, as an object with one key.

    An instance of a subclass becomes one of the plain type below it, and an array the list of its numbers.
    """
    if hasattr(value, "tolist") and not isinstance(value, type):  # a numpy array or number
        value = value.tolist()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {"bytes": value.decode("latin-1")}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, dict):
        return {"dict": [[packed(k, other), packed(v, other)] for k, v in value.items()]}
    for name, kind in COLLECTIONS.items():
        if isinstance(value, kind):
            return {name: [packed(item, other) for item in value]}
    return other(value)


def unpacked(value: Any, other: Callable[[str, Any], Any]) -> Any:
    """Return the value that `packed` was given; `other` gets the key and number of what is no plain value."""
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    if name == "bytes":
        return content.encode("latin-1")
    if name == "complex":
        return complex(*content)
    if name == "dict":
        return {unpacked(k, other): unpacked(v, other) for k, v in content}
    if name in COLLECTIONS:
        return COLLECTIONS[name](unpacked(item, other) for item in content)
    return other(name, content)


def line_of(message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


def receive(channel: BinaryIO) -> Any:
    """Return the next message; raise EOFError when the other side is gone."""
    line = channel.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return json.loads(line)
