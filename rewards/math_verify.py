"""Paid when the math-verify library finds the response's answer equal to the expected one, as mathematics."""

from __future__ import annotations

import functools
import logging
from typing import Annotated, Any

from math_verify import parse, verify
from pydantic import Field

from records.rollout import Trajectory

LATEX_MARKS = ("$", "\\boxed", "\\(", "\\[")

# It warns of every time-out; that is a 0 here.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_verify(
    trajectory: Trajectory, strict: bool = True, decimals: int = 6, seconds: Annotated[int, Field(ge=1)] = 4
) -> float:
    """1 when what the response ends in equals the answer: numbers, fractions, sets, intervals, matrices, equations.

    The library takes `\\boxed{...}` first, then other LaTeX, then plain expressions, the last of a kind. An answer
    that is not marked as LaTeX is read as if it were between dollars. `strict` keeps variables by name, and sets apart
    from tuples; `decimals` is what decimal numbers are rounded to.

    A response that cannot be read, or that takes longer than `seconds` to read or to compare, is worth 0: its writer
    chose the expression. The time-out is a signal, so this must run in the main thread, as it does in scoring
    processes; what no signal interrupts, the scoring service kills.

    Raises ValueError when the answer cannot be read.
    """
    wanted = _gold(str(trajectory.prompt.answer), seconds)
    if trajectory.prompt.answer is None or not wanted:
        raise ValueError(
            f"math-verify cannot read the answer of prompt {trajectory.prompt.prompt_id}: "
            f"{str(trajectory.prompt.answer)[:80]!r}; correct the row, or compare texts with exact_match"
        )
    given = parse(trajectory.response, parsing_timeout=seconds)
    return float(verify(list(wanted), given, decimals, strict=strict, timeout_seconds=seconds))


@functools.lru_cache(maxsize=1024)
def _gold(answer: str, seconds: int) -> tuple[Any, ...]:
    """The answer's expressions and its text; nothing when it is no mathematics."""
    text = answer if any(mark in answer for mark in LATEX_MARKS) else f"${answer}$"
    found = parse(text, parsing_timeout=seconds)
    return tuple(found) if any(not isinstance(part, str) for part in found) else ()
