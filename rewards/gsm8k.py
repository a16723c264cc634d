"""Reward responses as GSM8K does: by the number after the last `####`, compared as numbers (arXiv 2110.14168)."""

from __future__ import annotations

from fractions import Fraction

from records.rollout import Trajectory
from rewards.last_number import find_first_number, find_last_number

MARK = "####"


def gsm8k(trajectory: Trajectory, mark_required: bool = False) -> float:
    """Return 1 when the response's number equals the answer's, else 0.

    A response's number is the first one on the line behind the last `####` that a number follows. Without such a mark
    it is the last number, or none with `mark_required`. The answer is read the same way, so GSM8K's own column (`...
    #### 18`) can be used. Numbers are written the English way: `1,800.5` is one number, `1.800,50` is two.

    Raises:
        ValueError: the answer holds no number.
    """
    answer = trajectory.prompt.answer
    expected = None if answer is None else _number(str(answer))
    if expected is None:
        raise ValueError(
            f"the answer of prompt {trajectory.prompt.prompt_id} holds no number: {str(answer)[:80]!r}; correct the "
            "row, or use another reward"
        )
    given = _marked(trajectory.response) if mark_required else _number(trajectory.response)
    return float(given == expected)


def _number(text: str) -> Fraction | None:
    marked = _marked(text)
    return find_last_number(text) if marked is None else marked


def _marked(text: str) -> Fraction | None:
    """Return the first number on the line behind the last `####` that a number follows; None without one."""
    for behind in reversed(text.split(MARK)[1:]):
        number = find_first_number(behind.partition("\n")[0])
        if number is not None:
            return number
    return None
