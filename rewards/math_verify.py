"""Reward responses whose answer equals the expected one as mathematics, by the math-verify library."""

from __future__ import annotations

import functools
import logging
from typing import Annotated, Any

from math_verify import parse, verify
from pydantic import Field

from records.rollout import Trajectory

LATEX_MARKS = ("$", "\\boxed", "\\(", "\\[")

# The library warns of every time-out, which is an ordinary 0 here.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_verify(
    trajectory: Trajectory, strict: bool = True, decimals: int = 6, seconds: Annotated[int, Field(ge=1)] = 4
) -> float:
    """Return 1 when the response's final expression equals the answer, else 0.

    Numbers, fractions, sets, intervals, matrices and equations are compared. The library takes `\\boxed{...}` first,
    then other LaTeX, then plain expressions, and the last one of a kind. An answer that is not marked as LaTeX is read
    as if it stood between dollars. With `strict`, variables with different names differ, and so do sets and tuples.
    Decimal numbers are rounded to `decimals` places.

    A response that cannot be read, or that takes longer than `seconds` to read or to compare, gets 0. The time-out is a
    signal, so this must run in the main thread, as it does in scoring processes. What no signal interrupts, the scoring
    service kills.

    Raises:
        ValueError: the answer cannot be read.
    """
    expected = _parsed_answer(str(trajectory.prompt.answer), seconds)
    if trajectory.prompt.answer is None or not expected:
        raise ValueError(
            f"math-verify cannot read the answer of prompt {trajectory.prompt.prompt_id}: "
            f"{str(trajectory.prompt.answer)[:80]!r}; correct the row, or compare texts with exact_match"
        )
    given = parse(trajectory.response, parsing_timeout=seconds)
    return float(verify(list(expected), given, decimals, strict=strict, timeout_seconds=seconds))


@functools.lru_cache(maxsize=1024)
def _parsed_answer(answer: str, seconds: int) -> tuple[Any, ...]:
    """Return the answer's expressions and its text; an empty tuple when it is no mathematics."""
    text = answer if any(mark in answer for mark in LATEX_MARKS) else f"${answer}$"
    parts = parse(text, parsing_timeout=seconds)
    return tuple(parts) if any(not isinstance(part, str) for part in parts) else ()
