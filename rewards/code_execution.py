"""Reward programs that pass their row's tests, run in a sandbox."""

from __future__ import annotations

import json
import re
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from plugins.marks import checked_by
from records.rollout import Trajectory
from rewards.sandbox import run as sandbox
from rewards.sandbox.code_tests import Case, CodeCase, StdinCase, ValueCase, read_cases
from rewards.sandbox.run import Isolation, Limits

OPENING = re.compile(r"[ \t]*```[ \t]*(\w*)")
PYTHON = ("", "py", "python", "python3")
DRIVER = Path(__file__).with_name("sandbox") / "driver.py"


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
) -> float:
    """Return the share of the row's tests that the response's program passes; with `pay: all`, 1 if it passes all, else
    0.

    The program is the last fenced Python block (`take: block`; the reward is 0 without one) or the whole response. The
    column `tests_column` holds the tests, in a form that rewards/sandbox/code_tests.py reads; `setup_column` names
    Python text that is executed before the program. For tests on standard input the program runs once per test and must
    exit with 0; tests in Python share one run.

    `seconds` is for all tests together; tests that are not reached count as failed. Keep reward.timeout_seconds a few
    seconds above it. The other limits are per process (`scratch_mb` also in sum). `isolation: namespaces` needs user
    namespaces, and the run does not start without them; `limits_only` prevents excessive use and nothing else.

    Expected outputs, and values in `assert expression == literal`, never enter the sandbox. Other asserts and
    statements are judged in the program's own interpreter, where a program that tries to could report success itself.

    Raises:
        ValueError: the row has no tests, or they cannot be read.
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
        return 0.0
    limits = Limits(seconds, memory_mb, processes, scratch_mb)
    judged = _on_stdin if isinstance(cases[0], StdinCase) else _in_one_run
    passed = 0
    for case_passed in judged(program, setup, cases, limits, isolation):
        if pay == "all" and not case_passed:
            return 0.0
        passed += case_passed
    return passed / len(cases)


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


def _on_stdin(program: str, setup: str, cases: list[Case], limits: Limits, isolation: Isolation) -> Iterator[bool]:
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


def _in_one_run(program: str, setup: str, cases: list[Case], limits: Limits, isolation: Isolation) -> Iterator[bool]:
    word = secrets.token_hex(16)
    codes = [
        {"code": c.expression if isinstance(c, ValueCase) else c.code, "is_expression": isinstance(c, ValueCase)}
        for c in cases
        if isinstance(c, ValueCase | CodeCase)
    ]
    task = {"word": word, "program": program, "setup": setup, "cases": codes}
    command = [sys.executable, "-I", "driver.py"]
    ran = sandbox.run(
        command, {"driver.py": DRIVER.read_text()}, json.dumps(task).encode(), limits, isolation=isolation
    )
    values: dict[int, str] = {}
    for line in ran.result.decode(errors="replace").splitlines():
        try:
            line_word, index, value = json.loads(line)
        except (
            ValueError,
            TypeError,
            RecursionError,
        ):  # the program wrote this line, or was stopped in the middle of it
            continue
        if line_word == word and isinstance(index, int) and isinstance(value, str):
            values.setdefault(index, value)
    for index, case in enumerate(cases):
        yield index in values and case.passes(values[index])
