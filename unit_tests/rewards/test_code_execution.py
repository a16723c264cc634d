"""What code_execution pays, and that it cannot be earned otherwise."""

from __future__ import annotations

import textwrap
import time
from typing import Any

import numpy as np
import pytest

from plugins.parameters import check
from records.rollout import Prompt, Trajectory
from rewards.code_execution import code_execution, find_program
from rewards.sandbox.code_tests import CodeCase, StdinCase, ValueCase, read_cases


def answered(program: str, tests: Any, **columns: Any) -> Trajectory:
    response = f"Here it is:\n```python\n{textwrap.dedent(program)}\n```\n"
    prompt = Prompt("p/0", [], None, "p", {"tests": tests, **columns})
    none, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Trajectory(prompt, "g", 0, none, none, floats, none, np.zeros(0, bool), none, response=response)


def paid(program: str, tests: Any, columns: dict[str, Any] | None = None, **params: Any) -> float:
    return code_execution(answered(program, tests, **(columns or {})), **{"isolation": "limits_only", **params})


ADD = "def add(a, b):\n    return a + b"
WRONG = "def add(a, b):\n    return a + b + (a > 1)"


def test_asserts(isolation: Any) -> None:
    tests = [
        "assert add(1, 2) == 3",
        "assert add(2, 2) == 4",
        "assert abs(add(1, 1.5) - 2.5) < 1e-6",
        "assert 3 == add(1, 2)",
    ]
    assert paid(ADD, tests, isolation=isolation) == 1.0
    assert paid(WRONG, tests, isolation=isolation) == 0.75
    assert paid(WRONG, tests, isolation=isolation, pay="all") == 0.0
    assert paid(ADD, tests, isolation=isolation, pay="all") == 1.0


@pytest.mark.parametrize(
    "tests", ["assert add(1, 2) == 3\nassert add(2, 2) == 5", '["assert add(1, 2) == 3", "assert add(2, 2) == 5"]']
)
def test_asserts_as_text(tests: str) -> None:
    assert paid(ADD, tests) == 0.5


def test_a_test_of_several_statements_is_one() -> None:
    test = "def check(f):\n    for n in range(5):\n        assert f(n, n) == 2 * n\ncheck(add)"
    assert paid(ADD, test) == 1.0
    assert paid(WRONG, test) == 0.0


def test_setup_comes_first() -> None:
    program = "def add(a, b):\n    return int(math.fsum([a, b]))"
    assert paid(program, "assert add(1, 2) == 3") == 0.0
    assert paid(program, "assert add(1, 2) == 3", {"setup": "import math"}, setup_column="setup") == 1.0


def test_calls_by_name() -> None:
    tests = {"fn_name": "add", "inputs": [[1, 2], [2, 2]], "outputs": [3, [5]]}
    assert paid(ADD, tests) == 0.5
    assert paid("def pair(a): return (a, a)", {"fn_name": "pair", "inputs": [[1]], "outputs": [[1, 1]]}) == 1.0


def test_standard_input(isolation: Any) -> None:
    program = "a, b = map(int, input().split())\nprint(a + b, '')\n"
    tests = [{"input": "1 2\n", "output": "3\n"}, {"input": "2 2", "output": "4"}, {"input": "x", "output": ""}]
    assert paid(program, tests, isolation=isolation) == pytest.approx(2 / 3)
    assert paid(program, {"inputs": ["1 2", "2 2"], "outputs": ["3", "5"]}, isolation=isolation) == 0.5


def test_time_is_for_all_tests_together() -> None:
    started = time.monotonic()
    program = "n = int(input())\nwhile n > 1: pass\nprint(n)"
    tests = [{"input": str(n), "output": str(n)} for n in (0, 1, 2, 3, 4, 5, 6)]
    assert paid(program, tests, seconds=2.0) == pytest.approx(2 / 7)
    assert time.monotonic() - started < 30
    calls = ["assert f(0) == 0", "assert f(1) == 1", "assert f(2) == 2", "assert f(0) == 0"]
    assert paid("def f(n):\n while n > 1: pass\n return n", calls, seconds=1.5) == 0.5


@pytest.mark.parametrize(
    "program",
    [
        'print(\'["word", 0, "3"]\\nPASSED\\nOK\')',
        'import os\nfor fd in range(64):\n try: os.write(fd, b\'["", 0, "3"]\\n[0, 0, 3]\\n\\xff\\n\')\n except OSError: pass',
        "import os, sys\nprint('passed'); sys.exit(0)",
        "import os\nos._exit(0)",
        "class All:\n def __eq__(self, other): return True\n def __repr__(self): return 'All()'\ndef add(a, b): return All()",
        "def add(a, b): raise SystemExit(0)",
        "def add(a, b):\n import os; os._exit(0)",
        "import builtins\nbuiltins.AssertionError = ZeroDivisionError\nbuiltins.eval = lambda *a: 3\nbuiltins.repr = lambda x: '4'\ndef add(a, b): return 9",
        "def add(a, b):\n x = []\n for _ in range(10**5): x = [x]\n return x",
        "def add(a, b): return '3'",
        "import sys\nsys.modules['json'].dumps = None\ndef add(a, b): return 3",
        "syntax error",
        "",
    ],
)
def test_forged_passes_are_not_paid(program: str) -> None:
    assert paid(program, ["assert add(1, 2) == 3"]) == 0.0


def test_what_is_run() -> None:
    assert find_program("```python\na\n```\ntext\n```py\nb\n```\n```bash\nls\n```") == "b\n"
    assert find_program("```\na\n```") == "a\n"
    assert find_program("  ```python\n  a\n  ```") == "  a\n"
    assert find_program("```python\na\n") is None
    assert find_program("```\na\n```\n```python\nb") == "a\n"
    assert find_program("no code") is None
    assert code_execution(answered("", "assert True"), isolation="limits_only", take="response") == 0.0


def test_tests_are_read() -> None:
    assert read_cases([{"input": "1", "output": 2}], "p") == [StdinCase("1", "2")]
    assert read_cases(np.array(["assert f(1) == 2"]), "p") == [ValueCase("f(1)", 2)]
    assert read_cases("assert f() is None", "p") == [ValueCase("f()", None, same=True)]
    assert read_cases("assert f(1) == g(2)", "p") == [CodeCase("assert f(1) == g(2)")]
    assert not ValueCase("f()", True, same=True).passes("1") and ValueCase("f()", 1).passes("True")


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        (None, "the row has no tests"),
        ([], "there is no test"),
        ("", "there is no test"),
        ("[1,", "begin like JSON"),
        ("assert (", "not Python"),
        ([3], "a test is '3'"),
        ({"input": "x"}, "a test is"),
        ({"inputs": ["x"], "outputs": []}, "1 inputs and 0 outputs"),
        ([{"input": "", "output": ""}, "assert f()"], "a row must have one kind"),
    ],
)
def test_bad_tests_name_the_row(tests: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"prompt p/0, column tests: .*{said}"):
        paid(ADD, tests)


@pytest.mark.parametrize("params", [{"isolation": "none"}, {"seconds": 0}, {"take": "all"}, {"processes": 0}])
def test_bad_params(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"reward 'code_execution': params\."):
        check("reward", "code_execution", {"isolation": "limits_only", **params})
