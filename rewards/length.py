"""Reward responses of the right length."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from plugins.marks import checked_by
from records.rollout import Trajectory


def _in_order(low: int, high: int, target: int | None) -> None:
    if low > high:
        raise ValueError(f"params.low: {low} is above high {high}")
    if target is not None and not low <= target <= high:
        raise ValueError(f"params.target: {target} is not between low {low} and high {high}")


@checked_by(_in_order)
def length(
    trajectory: Trajectory,
    low: Annotated[int, Field(ge=0)],
    high: Annotated[int, Field(ge=0)],
    target: int | None = None,
) -> float:
    """Return 1 from `low` to `high` generated tokens, both included, and 0 outside.

    With `target`, the reward is 1 at the target and falls on straight lines to 0 at `low` and at `high`.
    """
    tokens = trajectory.action_tokens
    if not low <= tokens <= high:
        return 0.0
    if target is None or tokens == target:
        return 1.0
    end = low if tokens < target else high
    return (tokens - end) / (target - end)
