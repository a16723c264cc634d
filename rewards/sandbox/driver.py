"""In the sandbox, execute a program, evaluate expressions on what it defines, then answer tester.py's requests.

Standard input holds {"word", "program", "setup", "expressions"}. For each expression that raises nothing, the result
pipe gets a line [word, index, the value as Python writes it]. Expected values stay outside, and so do tests that
tester.py runs in a sandbox of its own: whatever the program does in this process, it can only give other answers.
"""

import importlib
import json
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any


def main() -> None:
    sys.path.insert(0, os.getcwd())
    plain_values = importlib.import_module("plain_values")  # the copy beside this file in the sandbox
    task = json.load(sys.stdin)
    result = os.fdopen(int(os.environ.pop("RESULT_FD")), "w")
    channel_fd = os.environ.pop("CHANNEL_FD", None)
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    os.dup2(devnull, 1)
    module = sys.modules["program"] = types.ModuleType("program")  # classes look their module up there
    try:
        exec(compile(task["setup"], "setup.py", "exec"), module.__dict__)
        exec(compile(task["program"], "program.py", "exec"), module.__dict__)
    except BaseException:  # noqa: BLE001 the program may raise anything
        traceback.print_exc()
        return
    for index, expression in enumerate(task["expressions"]):
        try:
            value = eval(compile(expression, f"test {index}", "eval"), module.__dict__)
            if hasattr(value, "tolist"):  # a numpy array or number
                value = value.tolist()
            text = repr(value)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            continue
        result.write(json.dumps([task["word"], index, text]) + "\n")
        result.flush()
    if channel_fd is None:
        return
    kept = _Kept(module.__dict__, plain_values.packed)
    with os.fdopen(int(channel_fd), "rb") as reader, os.fdopen(os.dup(reader.fileno()), "wb", buffering=0) as writer:
        while True:
            writer.write(_answer(plain_values, kept, plain_values.receive(reader)))


class _Kept:
    """What the tester knows by a number, because it is no plain value."""

    def __init__(self, names: dict[str, Any], packed: Callable[..., Any]) -> None:
        self.names, self.packed = names, packed
        self.values: list[Any] = []

    def handle(self, value: Any) -> dict[str, Any]:
        if hasattr(value, "__len__") and hasattr(value, "__iter__"):  # a range, a dictionary's keys
            return {"list": [self.packed(item, self.handle) for item in value]}
        self.values.append(value)
        kind = "iterator" if isinstance(value, Iterator) else "function" if callable(value) else "object"
        return {kind: len(self.values) - 1}


def _answer(plain_values: Any, kept: _Kept, request: list[Any]) -> bytes:
    """Return {"value"} or {"raised", "text"} for ["name", x], ["call", number, args, kwargs], ["get", number, x] or
    ["next", number]."""
    do: dict[str, Callable[..., Any]] = {
        "name": lambda name: kept.names[name],
        "call": lambda number, args, kwargs: kept.values[number](*args, **kwargs),
        "get": lambda number, name: getattr(kept.values[number], name),
        "next": lambda number: next(kept.values[number]),
    }
    try:
        what, *arguments = request
        given = [plain_values.unpacked(argument, lambda _, number: kept.values[number]) for argument in arguments]
        return bytes(plain_values.line_of({"value": plain_values.packed(do[what](*given), kept.handle)}))
    except BaseException as error:  # noqa: BLE001 the program may raise anything
        return bytes(plain_values.line_of({"raised": type(error).__name__, "text": str(error)[:200]}))


if __name__ == "__main__":
    try:
        main()
    finally:
        sys.stderr.flush()
        os._exit(0)
