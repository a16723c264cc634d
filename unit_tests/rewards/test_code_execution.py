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
from rewards.scoring.counted import Counted


def answered(program: str, tests: Any, **columns: Any) -> Trajectory:
    response = f"Here it is:\n```python\n{textwrap.dedent(program)}\n```\n"
    prompt = Prompt("p/0", [], None, "p", {"tests": tests, **columns})
    none, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Trajectory(prompt, "g", 0, none, none, floats, none, np.zeros(0, bool), none, response=response)


def judged(program: str, tests: Any, columns: dict[str, Any] | None = None, **params: Any) -> Counted:
    return code_execution(answered(program, tests, **(columns or {})), **{"isolation": "limits_only", **params})


def paid(program: str, tests: Any, columns: dict[str, Any] | None = None, **params: Any) -> float:
    value = judged(program, tests, columns, **params).value
    assert isinstance(value, float)
    return value


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


HUMAN_EVAL = """
METADATA = {'author': 'x'}

def check(candidate):
    assert candidate(4) == 2.0
    assert abs(candidate(2) - 1.41421) < 1e-3
    assert candidate(9) == 3, "message"
    assert all(abs(candidate(n * n) - n) < 1e-6 for n in range(1, 5))
    assert True

check(root)
"""
OF_BOOLEANS = """
def check(candidate):
    assert (candidate(4) == 2.0) is True
    assert candidate(9).is_integer() and candidate(9) >= 3 and not candidate(9) > 3
    assert isinstance(candidate(2), float) and math.isclose(candidate(2), 1.41421, rel_tol=1e-3)
    assert candidate(16) in (4.0, 4)
check(root)
"""
CLOSE = ["assert abs(root(2) - 1.41) < 0.01", "assert abs(root(9) - 3) <= 1e-9"]
ANYTHING = """
class E:
    def __eq__(self, o): return True
    __ne__ = __lt__ = __gt__ = __sub__ = __rsub__ = lambda self, o: False
    __le__ = __ge__ = __bool__ = __contains__ = lambda self, *o: True
    __hash__ = lambda self: 0
    __abs__ = lambda self: 0
    __float__ = lambda self: 1.41
    def is_integer(self): return True
    __class__ = float
"""
OF_FRAMES = """
import sys, json
def frames():
    frame = sys._getframe()
    while frame:
        yield frame
        frame = frame.f_back
for frame in frames():
    names = frame.f_locals
    if "task" in names and "result" in names:
        for i in range(9):
            for line in ([names["task"].get("word"), i, "0"], [i, "passed", ""]):
                names["result"].write(json.dumps(line) + "\\n")
        names["result"].flush()
def root(x): return 0.0
"""
TO_EVERY_PIPE = """
import os, socket
for fd in range(3, 64):
    try: os.write(fd, b'{"value": 2.0}\\n[0, "passed", ""]\\n[1, "passed", ""]\\n' * 9)
    except OSError: pass
def root(x): return 0.0
"""
CHEATS = {
    "an object that equals everything": ANYTHING + "def root(x): return E()",
    "a class in the function's place": ANYTHING + "class root(E):\n def __init__(self, x): pass",
    "a float that is near everything": (
        "class E(float):\n __eq__ = __gt__ = __lt__ = __le__ = __ge__ = lambda s, o: True\n"
        " __sub__ = __rsub__ = lambda s, o: 0.0\n __abs__ = lambda s: 0.0\ndef root(x): return E(0)"
    ),
    "an integer of its own": "class E(int):\n __eq__ = lambda s, o: True\n __sub__ = lambda s, o: 0\ndef root(x): return E(0)",
    "a text of its own": "class E(str):\n __eq__ = lambda s, o: True\n __sub__ = lambda s, o: 0\ndef root(x): return E('a')",
    "not a number": "def root(x): return float('nan')",
    "the driver's frames": OF_FRAMES,
    "every pipe": TO_EVERY_PIPE,
    "compile": "import builtins\nbuiltins.compile = lambda *a, **k: (lambda: None).__code__\ndef root(x): return 0.0",
    "builtins": (
        "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.all = builtins.isinstance = lambda *a: True\n"
        "builtins.AssertionError = ZeroDivisionError\ndef abs(x): return 0\ndef root(x): return 0.0"
    ),
    "modules": "import math, json\nmath.isclose = lambda *a, **k: True\njson.dumps = lambda x: '{}'\ndef root(x): return 0.0",
    "names of the test": "def check(f): pass\nclass math: isclose = lambda *a, **k: True\ndef root(x): return 0.0",
    "repr": "class E:\n __repr__ = lambda s: '2.0'\ndef root(x): return E()",
    "the end of a loop": "def root(x): raise StopIteration",
    "exit": "import sys\ndef root(x): sys.exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "an assertion of its own": "def root(x): raise AssertionError",
    "a function that answers": ANYTHING + "def root(x): return root",
    "an iterator": ANYTHING + "class I(E):\n def __iter__(s): return s\n def __next__(s): return 0\ndef root(x): return I()",
    "a collection": ANYTHING + "class I(E, list): pass\ndef root(x): return I()",
    "another process": "import os\nif os.fork(): os.waitpid(-1, 0)\ndef root(x): return 0.0",
    "collected garbage": (
        "import gc\nfor o in gc.get_objects():\n if isinstance(o, dict) and 'has_failed' in o: o['has_failed'] = False\n"
        "def root(x): return 0.0"
    ),
    "the tester's file": "import glob\nfor p in glob.glob('/tmp/**/tester.py', recursive=True): open(p, 'w')\ndef root(x): return 0.0",
}  # fmt: skip
HONEST_ROOT = "def root(x): return x ** 0.5"


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheats_get_what_they_deserve(cheat: str, namespaces: str) -> None:
    tests = [HUMAN_EVAL, OF_BOOLEANS, *CLOSE]
    assert paid(CHEATS[cheat], tests, isolation="namespaces") == 0.0


def test_honest_programs_pass_what_cheats_try(isolation: Any) -> None:
    tests = [HUMAN_EVAL, OF_BOOLEANS, *CLOSE]
    assert judged(HONEST_ROOT, tests, isolation=isolation) == Counted(1.0, {"unproven": 0})
    assert paid("import numpy\ndef root(x): return numpy.sqrt(x)", tests) == 1.0
    assert judged("class E: pass\ndef root(x): return E()", tests) == Counted(0.0, {"unproven": 4})


HONEST = """
from collections import Counter, namedtuple, OrderedDict
Point = namedtuple("Point", "x y")
def pairs(n): return [(i, {str(i): [i]}) for i in range(n)]
def squares(n):
    for i in range(n): yield i * i
def adder(n): return lambda m: n + m
def counts(text): return Counter(text)
def point(): return Point(1, 2.5)
def numbers(n): return range(n)
def odd(): return {"nan": float("nan"), "inf": -float("inf"), "raw": b"\\xff", "c": 1j, "s": {1}, "f": frozenset([2]), "u": "\\u00e9\\ud800"}
def refuse(x): raise ValueError("no " + x)
def of_class(x): raise MyError()
class MyError(Exception): pass
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x); return self
    def pop(self): return self.items.pop()
def size(stack): return len(stack.items)
"""
HONEST_TESTS = [
    "assert pairs(2) == [(0, {'0': [0]}), (1, {'1': [1]})]",
    "assert sorted(pairs(2), key=lambda p: -p[0])[0][1] == {'1': [1]}",
    "for n in range(4):\n    assert list(squares(n)) == [i * i for i in range(n)]",
    "assert adder(2)(3) == 5 and sum(map(adder(1), [1, 2])) == 5",
    "assert counts('aab') == {'a': 2, 'b': 1} and tuple(point()) == (1, 2.5)",
    "assert list(numbers(3)) == [0, 1, 2] and len(numbers(3)) == 3",
    "import math\no = odd()\nassert math.isnan(o['nan']) and o['inf'] < -9e9 and o['raw'] == b'\\xff' and o['c'] == 1j",
    "o = odd()\nassert o['s'] == {1} and o['f'] == frozenset([2]) and o['u'] == '\\u00e9\\ud800'",
    "try:\n    refuse('x')\nexcept ValueError as error:\n    assert str(error) == 'no x'\nelse:\n    assert False",
    "try:\n    of_class(1)\nexcept Exception:\n    pass\nelse:\n    assert False",
    "s = Stack()\ns.push(3)\ns.push(4)\nassert size(s) == 2 and s.pop() == 4 and s.items == [3]",
    "def check(pairs):\n    assert len(pairs(3)) == 3\ncheck(pairs)",
    "assert np.allclose(list(squares(3)), [0, 1, 4])",
]


def test_honest_programs_pass_tests_of_many_forms() -> None:
    found = {test: paid(HONEST, [test]) for test in HONEST_TESTS}
    assert found == dict.fromkeys(HONEST_TESTS, 1.0)


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("def check(candidate):\n    assert candidate(1) == 1", "it never asks the program"),
        ("assert root(lambda x: x) == 1", "hands the program a function, which is no plain value"),
        ("class T: pass\nassert root(T()) == 1", "hands the program a T"),
    ],
)
def test_tests_that_cannot_be_judged_are_told(test: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"prompt p/0, column tests: the test .* cannot be judged: .*{said}"):
        paid(HONEST_ROOT, [test])


def test_what_is_run() -> None:
    assert find_program("```python\na\n```\ntext\n```py\nb\n```\n```bash\nls\n```") == "b\n"
    assert find_program("```\na\n```") == "a\n"
    assert find_program("  ```python\n  a\n  ```") == "  a\n"
    assert find_program("```python\na\n") is None
    assert find_program("```\na\n```\n```python\nb") == "a\n"
    assert find_program("no code") is None
    assert code_execution(answered("", "assert f() == 1"), isolation="limits_only", take="response").value == 0.0


def test_tests_are_read() -> None:
    assert read_cases([{"input": "1", "output": 2}], "p") == [StdinCase("1", "2")]
    assert read_cases(np.array(["assert f(1) == 2"]), "p") == [ValueCase("f(1)", 2)]
    assert read_cases("assert f() is None", "p") == [ValueCase("f()", None, same=True)]
    assert read_cases("assert (f(1) == 2) is True", "p") == [CodeCase("assert (f(1) == 2) is True")]
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
