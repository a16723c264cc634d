"""The tests of a program, as a data row holds them, and whether an answer passes one."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StdinCase:
    """The whole program is run on an input; what it prints is compared."""

    given: str
    wanted: str

    def passes(self, output: str) -> bool:
        """Line by line, without white space at the lines' ends and empty lines at the end."""
        return _lines(output) == _lines(self.wanted)


@dataclass(frozen=True)
class ValueCase:
    """An expression is evaluated where the program was executed; its value is compared outside the sandbox."""

    expression: str
    wanted: Any
    same: bool = False  # `is`, for None, True and False

    def passes(self, value: str) -> bool:
        """`value` is the value as Python writes it; what is no literal (an object) equals nothing."""
        try:
            found = ast.literal_eval(value)
            return bool(found is self.wanted if self.same else found == self.wanted)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return False


@dataclass(frozen=True)
class CodeCase:
    """Statements that pass when they raise nothing, in the program's own interpreter."""

    code: str

    def passes(self, value: str) -> bool:
        return True


Case = StdinCase | ValueCase | CodeCase


def read_cases(tests: Any, where: str) -> list[Case]:
    """The cases in a row's column, or in the JSON text it holds:

    - `[{"input": "1 2", "output": "3"}, ...]` or `{"inputs": [...], "outputs": [...]}`: standard input and output;
    - the latter with `"fn_name": "add"`: each input a list of arguments, each output the value (or a list of just it);
    - Python text, or a list of it: asserts, one case each; with other statements between them, one case for the text.

    Raises ValueError, beginning with `where`, when it is none of these, or holds no test.
    """
    if isinstance(tests, str) and tests.lstrip().startswith(("[", "{")):
        try:
            tests = json.loads(tests)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: the tests begin like JSON and are none: {error}") from error
    if hasattr(tests, "tolist"):  # of a data frame
        tests = tests.tolist()
    cases: list[Case] = []
    if isinstance(tests, dict) and {"inputs", "outputs"} <= tests.keys():
        cases += _pairs(tests, where)
    elif isinstance(tests, str):
        cases += _from_code(tests, where)
    else:
        for test in tests if isinstance(tests, list | tuple) else [tests]:
            if isinstance(test, dict) and {"input", "output"} <= test.keys():
                cases.append(StdinCase(str(test["input"]), str(test["output"])))
            elif isinstance(test, str):
                cases += _from_code(test, where)
            else:
                raise ValueError(
                    f"{where}: a test is {str(test)[:80]!r}; it is Python text, or an object with 'input' and 'output'"
                )
    if not cases:
        raise ValueError(f"{where}: there is no test")
    if len({isinstance(case, StdinCase) for case in cases}) > 1:
        raise ValueError(f"{where}: some tests are inputs and outputs, others Python text; a row has one kind")
    return cases


def _pairs(tests: dict[str, Any], where: str) -> list[Case]:
    inputs, outputs = list(tests["inputs"]), list(tests["outputs"])
    if len(inputs) != len(outputs):
        raise ValueError(f"{where}: {len(inputs)} inputs and {len(outputs)} outputs")
    name = tests.get("fn_name")
    if name is None:
        return [StdinCase(_text(given), _text(wanted)) for given, wanted in zip(inputs, outputs, strict=True)]
    cases: list[Case] = []
    for given, wanted in zip(inputs, outputs, strict=True):
        value = wanted[0] if isinstance(wanted, list) and len(wanted) == 1 else wanted
        arguments = ", ".join(map(repr, given))
        # JSON has no tuples.
        cases.append(ValueCase(f"(lambda v: list(v) if type(v) is tuple else v)({name}({arguments}))", value))
    return cases


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _from_code(code: str, where: str) -> list[Case]:
    try:
        statements = ast.parse(code).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{where}: a test is not Python: {error}: {code[:80]!r}") from error
    if not statements or not all(isinstance(statement, ast.Assert) for statement in statements):
        return [CodeCase(code)] if statements else []
    return [_from_assert(statement) for statement in statements if isinstance(statement, ast.Assert)]


def _from_assert(statement: ast.Assert) -> Case:
    """`assert expression == literal`, either way round, can be compared outside the sandbox; other asserts cannot."""
    test = statement.test
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.Is):
        same = isinstance(test.ops[0], ast.Is)
        for expression, literal in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
            try:
                wanted = ast.literal_eval(literal)
            except (ValueError, TypeError):
                continue
            if not same or wanted is None or isinstance(wanted, bool):
                return ValueCase(ast.unparse(expression), wanted, same)
    return CodeCase(ast.unparse(statement))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
