"""Reward programs that pass their row's tests, run in a sandbox."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from plugins.marks import checked_by
from records.rollout import Trajectory
from rewards.sandbox import run as sandbox
from rewards.sandbox.code_tests import Case, CodeCase, StdinCase, ValueCase, read_cases
from rewards.sandbox.run import Isolation, Limits
from rewards.scoring.counted import Counted

OPENING = re.compile(r"[ \t]*```[ \t]*(\w*)")
PYTHON = ("", "py", "python", "python3")
SANDBOX = Path(__file__).with_name("sandbox")


def _sandbox_stands(isolation: Isolation, **_: Any) -> None:
    sandbox.check(isolation)


@checked_by(_sandbox_stands)
def code_execution(
    trajectory: Trajectory,
    tests_column: str = "tests",
    setup_column: str | None = None,
    take: Literal["block", "response"] = "block",
    pay: Literal["share", "all"] = "share",
    isolation: Isolation = "namespaces",
    seconds: Annotated[float, Field(gt=0)] = 5.0,
    memory_mb: Annotated[int, Field(ge=32)] = 512,
    processes: Annotated[int, Field(ge=1)] = 8,
    scratch_mb: Annotated[int, Field(ge=1)] = 64,
) -> Counted:
    """Return the share of the row's tests that the response's program passes; with `pay: all`, 1 if it passes all, else
    0.

    The program is the last fenced Python block (`take: block`; the reward is 0 without one) or the whole response. The
    column `tests_column` holds the tests, in a form that rewards/sandbox/code_tests.py reads; `setup_column` names
    Python text that is executed before the program. For tests on standard input the program runs once per test and must
    exit with 0; tests in Python share one run.

    `seconds` is for all tests together; tests that are not reached count as failed. Keep reward.timeout_seconds a few
    seconds above it. The other limits are per process (`scratch_mb` also in sum). `isolation: namespaces` needs user
    namespaces, and the run does not start without them; `limits_only` prevents excessive use and nothing else.

    Nothing is judged where the program runs. Expected outputs, and values in `assert f(literals) == literal`, never
    enter the sandbox; other tests run in a second one, and get plain values from the program. A test that an object of
    the program's own would decide is not paid and counted as `unproven`.

    Raises:
        ValueError: the row has no tests, or they cannot be read, or one cannot be judged.
        RuntimeError: the sandbox cannot be set up.
    """
    prompt = trajectory.prompt
    where = f"prompt {prompt.prompt_id}, column {tests_column}"
    if prompt.columns.get(tests_column) is None:
        raise ValueError(f"{where}: the row has no tests; set params.tests_column to the column that holds them")
    cases = read_cases(prompt.columns[tests_column], where)
    setup = "" if setup_column is None else str(prompt.columns.get(setup_column) or "")
    program = find_program(trajectory.response) if take == "block" else trajectory.response
    if program is None:
        return Counted(0.0, {"unproven": 0})
    limits = Limits(seconds, memory_mb, processes, scratch_mb)
    judged = _on_stdin if isinstance(cases[0], StdinCase) else _in_one_run
    passed: list[bool | None] = []
    try:
        for case_passed in judged(program, setup, cases, limits, isolation):
            passed.append(case_passed)
            if pay == "all" and not case_passed:
                break
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    paid = sum(map(bool, passed)) / len(cases)
    return Counted(paid if pay == "share" else float(paid == 1), {"unproven": passed.count(None)})


def find_program(response: str) -> str | None:
    """Return the last closed fenced block that is Python or names no language; None without one."""
    found, language = None, None  # of the block that is open; a regular expression for whole blocks can take for ever
    inside: list[str] = []
    for line in response.split("\n"):
        if language is not None and line.strip(" \t") == "```":
            found = "".join(inside) if language.lower() in PYTHON else found
            language = None
        elif language is not None:
            inside.append(f"{line}\n")
        elif opening := OPENING.match(line):
            language, inside = opening[1], []
    return found


def _on_stdin(
    program: str, setup: str, cases: list[Case], limits: Limits, isolation: Isolation
) -> Iterator[bool | None]:
    deadline = time.monotonic() + limits.seconds
    text = f"{setup}\n{program}" if setup else program
    for case in cases:
        assert isinstance(case, StdinCase), "a row's tests are of one kind"
        left = deadline - time.monotonic()
        if left <= 0:
            yield False
            continue
        command = [sys.executable, "-I", "program.py"]
        own = replace(limits, seconds=left)
        ran = sandbox.run(command, {"program.py": text}, case.given.encode(), own, isolation=isolation)
        yield ran.exit_code == 0 and case.passes(ran.output.decode(errors="replace"))


def _in_one_run(
    program: str, setup: str, cases: list[Case], limits: Limits, isolation: Isolation
) -> Iterator[bool | None]:
    """Yield for each case whether it passed; None when an object of the program's own would have decided.

    The program runs in one sandbox. Tests in Python run in another, and talk with it in plain values.
    """
    values = {i: case for i, case in enumerate(cases) if isinstance(case, ValueCase)}
    tests = {i: case.code for i, case in enumerate(cases) if isinstance(case, CodeCase)}
    word = secrets.token_hex(16)
    task = {"word": word, "program": program, "setup": setup, "expressions": [c.expression for c in values.values()]}
    with ThreadPoolExecutor(1) as side:
        channel = None
        if tests:
            channel, other_end = (end.detach() for end in socket.socketpair())
            given = {"setup": setup, "tests": list(tests.values())}
            testing = side.submit(_run_side, "tester", given, limits, isolation, other_end)
        found: dict[int, str] = {}
        for line in _run_side("driver", task, limits, isolation, channel):
            if len(line) == 3 and line[0] == word and isinstance(line[1], int) and isinstance(line[2], str):
                found.setdefault(line[1], line[2])
        verdicts = {line[0]: line[1:] for line in testing.result()} if tests else {}
    passed: dict[int, bool | None] = {}
    for index, (place, case) in enumerate(values.items()):
        passed[place] = index in found and case.passes(found[index])
    for index, (place, code) in enumerate(tests.items()):
        verdict, why = verdicts.get(index, ("failed", ""))
        if verdict == "unjudged":
            raise ValueError(f"the test {code[:80]!r} cannot be judged: {why}; correct the row, or leave it out")
        passed[place] = None if verdict == "unproven" else verdict == "passed"
    yield from (passed[place] for place in range(len(cases)))


def _run_side(name: str, task: dict[str, Any], limits: Limits, isolation: Isolation, channel: int | None) -> list[Any]:
    """Run rewards/sandbox/<name>.py, and return the lists in its result."""
    files = {file: (SANDBOX / file).read_text() for file in (f"{name}.py", "plain_values.py")}
    command = [sys.executable, "-I", f"{name}.py"]
    ran = sandbox.run(command, files, json.dumps(task).encode(), limits, isolation=isolation, channel=channel)
    lines = []
    for text in ran.result.decode(errors="replace").splitlines():
        with contextlib.suppress(
            ValueError, RecursionError
        ):  # the program wrote it, or was stopped in the middle of it
            if isinstance(line := json.loads(text), list):
                lines.append(line)
    return lines
