"""Read the tests of a program from a data row, and decide whether a program's output passes one."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StdinCase:
    """A test that runs the whole program on an input and compares what it prints."""

    given: str
    expected: str

    def passes(self, output: str) -> bool:
        """Compare line by line, without white space at the ends of lines and empty lines at the end."""
        return _lines(output) == _lines(self.expected)


@dataclass(frozen=True)
class ValueCase:
    """A test whose expression is evaluated where the program ran, and whose value is compared outside the sandbox."""

    expression: str
    expected: Any
    same: bool = False  # compare by `is`, for None, True and False

    def passes(self, value: str) -> bool:
        """Compare the value, given as Python writes it. A value that is no literal (an object) equals nothing."""
        try:
            actual = ast.literal_eval(value)
            return bool(actual is self.expected if self.same else actual == self.expected)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return False


@dataclass(frozen=True)
class CodeCase:
    """A test of statements that pass when they raise nothing. rewards/sandbox/tester.py runs them."""

    code: str


Case = StdinCase | ValueCase | CodeCase


def read_cases(tests: Any, where: str) -> list[Case]:
    """Return the cases in a row's column, or in the JSON text that it holds. `where` names the column in messages.

    - `[{"input": "1 2", "output": "3"}, ...]` or `{"inputs": [...], "outputs": [...]}` means standard input and output.
    - The latter with `"fn_name": "add"` means a call: each input is a list of arguments, each output the value (or a
    list
      of just the value).
    - Python text, or a list of such texts, means asserts, one case each; a text with other statements is one case.

    Raises:
        ValueError: the column holds none of these, or no test.
    """
    if isinstance(tests, str) and tests.lstrip().startswith(("[", "{")):
        try:
            tests = json.loads(tests)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{where}: the tests begin like JSON, but are not JSON: {error}; correct the row"
            ) from error
    if hasattr(tests, "tolist"):  # an array of a data frame
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
                    f"{where}: a test is {str(test)[:80]!r}; it must be Python text, or an object with 'input' and "
                    "'output'"
                )
    if not cases:
        raise ValueError(f"{where}: there is no test; add one, or leave the row out")
    if len({isinstance(case, StdinCase) for case in cases}) > 1:
        raise ValueError(f"{where}: some tests are inputs and outputs, others Python text; a row must have one kind")
    return cases


def _pairs(tests: dict[str, Any], where: str) -> list[Case]:
    inputs, outputs = list(tests["inputs"]), list(tests["outputs"])
    if len(inputs) != len(outputs):
        raise ValueError(f"{where}: there are {len(inputs)} inputs and {len(outputs)} outputs; give equally many")
    name = tests.get("fn_name")
    if name is None:
        return [StdinCase(_text(given), _text(expected)) for given, expected in zip(inputs, outputs, strict=True)]
    cases: list[Case] = []
    for given, expected in zip(inputs, outputs, strict=True):
        value = expected[0] if isinstance(expected, list) and len(expected) == 1 else expected
        arguments = ", ".join(map(repr, given))
        # JSON has no tuples, so a returned tuple is compared as a list.
        cases.append(ValueCase(f"(lambda v: list(v) if type(v) is tuple else v)({name}({arguments}))", value))
    return cases


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _from_code(code: str, where: str) -> list[Case]:
    try:
        statements = ast.parse(code).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{where}: a test is not Python: {error}: {code[:80]!r}; correct the row") from error
    if not statements or not all(isinstance(statement, ast.Assert) for statement in statements):
        return [CodeCase(code)] if statements else []
    return [_from_assert(statement) for statement in statements if isinstance(statement, ast.Assert)]


def _from_assert(statement: ast.Assert) -> Case:
    """Return a case that is compared outside the sandbox for `assert f(literals) == literal`, either way round.

    In a longer expression the program's own objects could say what they like about themselves.
    """
    test = statement.test
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.Is):
        same = isinstance(test.ops[0], ast.Is)
        for expression, literal in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
            try:
                expected = ast.literal_eval(literal)
            except (ValueError, TypeError):
                continue
            if _is_plain_call(expression) and (not same or expected is None or isinstance(expected, bool)):
                return ValueCase(ast.unparse(expression), expected, same)
    return CodeCase(ast.unparse(statement))


def _is_plain_call(expression: ast.expr) -> bool:
    if not isinstance(expression, ast.Call) or not isinstance(expression.func, ast.Name):
        return False
    try:
        for argument in (*expression.args, *(keyword.value for keyword in expression.keywords)):
            ast.literal_eval(argument)
    except (ValueError, TypeError):
        return False
    return True


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
