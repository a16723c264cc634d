"""Reward responses that end by themselves, within the length limit."""

from __future__ import annotations

from records.rollout import Trajectory


def ended(trajectory: Trajectory) -> float:
    """Return 1 when the response ended by itself (end token or stop string), 0 when it was cut."""
    return float(trajectory.finish_reason == "stop")
