"""A megabyte of what a reward's parser likes least: a policy that is stuck in a loop writes such texts."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rewards.code_execution import find_program
from rewards.format_match import format_match
from rewards.last_number import last_number
from rewards.multiple_choice import multiple_choice
from rewards.numeric_precision import numeric_precision
from unit_tests.rewards.test_rewards import trajectory

SECONDS = 8  # of the processor; each takes less than one, and a parser that reads anything twice takes minutes


@pytest.fixture(autouse=True)
def _limit() -> Iterator[None]:
    def too_slow(*_: Any) -> None:
        raise AssertionError(f"it was not read within {SECONDS} s of processor time")

    before = signal.signal(signal.SIGPROF, too_slow)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


def megabyte(text: str) -> str:
    return text * (1_000_000 // len(text))


@pytest.mark.parametrize(
    "text",
    ["```python\n", "```a\n", "\n", " ", " ```", ("```", " "), "``````\n"],
)  # fmt: skip
def test_code_fences(text: str | tuple[str, str]) -> None:
    begin, repeated = text if isinstance(text, tuple) else ("", text)
    assert not (find_program(begin + megabyte(repeated)) or "").strip(" `\n")


@pytest.mark.parametrize(
    ("reward", "answer", "begin", "repeated", "end"),
    [
        (last_number, "3", "", "9", ""),
        (last_number, "3/4", "", "1 / ", ""),
        (last_number, "3", "1", ",111", "1"),
        (last_number, "3", "", "-$", ""),
        (last_number, "3", "", "1e999 ", ""),
        (multiple_choice, "B", "answer", " ", "x"),
        (multiple_choice, "B", "answer a", " ", "x"),
        (multiple_choice, "B", "", "answer is ", ""),
        (multiple_choice, "B", "", r"\boxed{\text{ ", ""),
        (multiple_choice, "B", "(A)", " A, ", ""),
        (multiple_choice, "B", "A", " ", "(C)"),
        (numeric_precision, "3.5", "", "9", ""),
        (numeric_precision, "[1, 2]", "", "[", ""),
        (numeric_precision, "[1, 2]", "[", "1,", "1]"),
        (format_match, None, "<think>", " ", "</think>"),
        (format_match, None, "<think>", "a<", "</think><answer>"),
        (format_match, None, "", "<think>", ""),
        (format_match, None, "", " ", "<think>"),
    ],
)
def test_answers(reward: Callable[..., float], answer: str | None, begin: str, repeated: str, end: str) -> None:
    options: dict[str, Any] = {"tags": ["think", "answer"]} if reward is format_match else {}
    assert reward(trajectory(begin + megabyte(repeated) + end, answer), **options) == 0
