"""In a sandbox without the program, run tests in Python that ask the program for plain values. See driver.py.

Standard input holds {"setup", "tests"}. A name that neither Python nor setup nor the test defines stands for the
program's; calling it asks the process in which the program runs. What a function gives back is a number, a text, a
collection of such, an iterator or a function. Other objects would decide by `==` or methods of their own; only names
with a capital letter (classes) give objects whose attributes and methods a test can use. The result pipe gets a line
[index, verdict, why] for each test.
"""

import ast
import builtins
import contextlib
import importlib
import importlib.util
import json
import os
import symtable
import sys
import traceback
from typing import Any, BinaryIO


class ProgramError(Exception):
    """The program raised an exception that is not Python's own."""


class Ended(ProgramError):
    """An iterator of the program has ended, or the program raised this, which a test's loop would take for its own
    end."""


class NoAnswer(BaseException):
    """The program has ended, or answered with what is no plain value."""


class Unjudged(BaseException):
    """The test cannot be run without the program's objects."""


class Program:
    """The process in which the program runs, as the tests ask it."""

    def __init__(self, plain_values: Any, channel: int) -> None:
        self.plain_values = plain_values
        self.writer: BinaryIO = os.fdopen(channel, "wb", buffering=0)
        self.reader: BinaryIO = os.fdopen(os.dup(channel), "rb")
        self.start_test()

    def start_test(self) -> None:
        self.asked = self.has_failed = self.gave_object = False

    def ask(self, *request: Any, objects: bool = False) -> Any:
        """Return the program's answer. Without `objects`, an object of its own is no answer."""
        line = self.plain_values.line_of([self.plain_values.packed(part, self._handle) for part in request])
        self.asked = True
        try:
            self.writer.write(line)
            answer = self.plain_values.receive(self.reader)
            error = None if "value" in answer else _error(answer["raised"], str(answer["text"]))
            value = error or self.plain_values.unpacked(
                answer["value"], lambda kind, number: self._stand_in(kind, number, objects)
            )
        except Exception as wrong:  # noqa: BLE001 the program wrote this answer, or is gone
            self.has_failed = True
            raise NoAnswer(str(wrong)) from None
        if error is not None:
            raise error
        return value

    def _handle(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Function | Iterated | Object | Opaque):
            return {"number": object.__getattribute__(value, "_number")}
        raise Unjudged(f"it hands the program a {type(value).__name__}, which is no plain value")

    def _stand_in(self, kind: str, number: int, objects: bool) -> Any:
        if kind == "function":
            return Function(self, number, objects)
        if kind == "iterator":
            return Iterated(self, number)
        self.gave_object = True
        return Object(self, number) if objects else Opaque(number)


class Function:
    __slots__ = ("_number", "_objects", "_program")

    def __init__(self, program: Program, number: int, objects: bool) -> None:
        self._program, self._number, self._objects = program, number, objects

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._program.ask("call", self._number, args, kwargs, objects=self._objects)


class Iterated:
    __slots__ = ("_number", "_program")

    def __init__(self, program: Program, number: int) -> None:
        self._program, self._number = program, number

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        try:
            return self._program.ask("next", self._number)
        except Ended:
            raise StopIteration from None


class Opaque:
    """An object of the program's own that a function gave back. It can be handed to the program, and decides
    nothing."""

    __slots__ = ("_number",)

    def __init__(self, number: int) -> None:
        self._number = number

    def __bool__(self) -> bool:
        raise NoAnswer

    def __eq__(self, other: object) -> bool:
        raise NoAnswer


class Object:
    __slots__ = ("_number", "_program")

    def __init__(self, program: Program, number: int) -> None:
        self._program, self._number = program, number

    def __getattr__(self, name: str) -> Any:
        return self._program.ask("get", self._number, name)


def _error(name: str, text: str) -> Exception:
    """Return the exception that a test sees when the program raised one of this name."""
    kind = Ended if name == "StopIteration" else getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # some take more than a text
            return kind(text)
    return ProgramError(f"{name}: {text}")


def run_test(code: str, names: dict[str, Any], program: Program) -> tuple[str, str]:
    """Return "passed", "failed", "unproven" (an object of the program's own decides) or "unjudged", and why."""
    program.start_test()
    try:
        names = {**names, **_missing(code, names, program)}
        exec(compile(code, "test", "exec"), names)
    except Unjudged as error:
        return "unjudged", str(error)
    except BaseException as error:  # noqa: BLE001 a test fails by raising
        traceback.print_exc()
        is_unproven = program.gave_object and isinstance(error, NoAnswer | TypeError | AttributeError)
        return "unproven" if is_unproven else "failed", ""
    if not program.asked:
        return "unjudged", "it never asks the program"
    return "failed" if program.has_failed else "passed", ""


def _missing(code: str, names: dict[str, Any], program: Program) -> dict[str, Any]:
    """Return what the test's free names stand for: modules where it takes attributes of them, or the program's."""
    owners = {
        n.value.id for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)
    }
    found: dict[str, Any] = {}
    for name in _free_names(symtable.symtable(code, "test", "exec")) - names.keys() - set(dir(builtins)):
        module = {"np": "numpy", "pd": "pandas"}.get(name, name)
        if name in owners and importlib.util.find_spec(module):
            found[name] = importlib.import_module(module)
        else:
            with contextlib.suppress(KeyError):
                found[name] = program.ask("name", name, objects=name[0].isupper())
    return found


def _free_names(test: symtable.SymbolTable) -> set[str]:
    """Return the names that a test uses and does not define."""
    scopes = [test]
    for scope in scopes:
        scopes += scope.get_children()
    defined = {s.get_name() for s in test.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    used = {s.get_name() for scope in scopes for s in scope.get_symbols() if s.is_referenced() and s.is_global()}
    return used - defined


def main() -> None:
    sys.path.insert(0, os.getcwd())
    plain_values = importlib.import_module("plain_values")  # the copy beside this file in the sandbox
    task = json.load(sys.stdin)
    result = os.fdopen(int(os.environ.pop("RESULT_FD")), "w")
    program = Program(plain_values, int(os.environ.pop("CHANNEL_FD")))
    names: dict[str, Any] = {"__name__": "tests"}
    try:
        exec(compile(task["setup"], "setup.py", "exec"), names)
        why = ""
    except BaseException as error:  # noqa: BLE001
        why = f"the setup raises {type(error).__name__}: {error}"
    for index, test in enumerate(task["tests"]):
        verdict = ("unjudged", why) if why else run_test(test, dict(names), program)
        result.write(json.dumps([index, *verdict]) + "\n")
        result.flush()


if __name__ == "__main__":
    try:
        main()
    finally:
        sys.stderr.flush()
        os._exit(0)
