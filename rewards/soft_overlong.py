"""Penalise responses that come close to the length limit (DAPO, arXiv 2503.14476, equation 13)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from plugins.marks import checked_by
from records.rollout import Trajectory


def _buffer_fits(max_tokens: int, buffer_tokens: int, penalty: float) -> None:
    if buffer_tokens > max_tokens:
        raise ValueError(
            f"params.buffer_tokens: {buffer_tokens} is more than max_tokens {max_tokens}; use at most that"
        )


@checked_by(_buffer_fits)
def soft_overlong(
    trajectory: Trajectory,
    max_tokens: Annotated[int, Field(ge=1)],
    buffer_tokens: Annotated[int, Field(ge=1)],
    penalty: Annotated[float, Field(ge=0)] = 1.0,
) -> float:
    """Return min(0, -penalty * (len - (max_tokens - buffer_tokens)) / buffer_tokens), but at least -penalty.

    This is 0 up to max_tokens - buffer_tokens generated tokens, and falls from there to -penalty at max_tokens.
    """
    over = trajectory.action_tokens - (max_tokens - buffer_tokens)
    return 0.0 - penalty * min(max(over / buffer_tokens, 0.0), 1.0)
