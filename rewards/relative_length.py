"""Paid for being shorter than the others of its group (Kimi k1.5, arXiv 2501.12599, section 2.3.3)."""

from __future__ import annotations

from plugins.lookup import of_group
from records.rollout import Group


@of_group
def relative_length(group: Group, right_at: float = 0.5) -> list[float]:
    """0.5 - (len - shortest) / (longest - shortest) for right responses, from 0.5 to -0.5; for others the same, but
    never above 0. 0 for all when all are equally long.

    Lengths are of generated tokens, over the responses that the other parts could score. Right is what those parts pay
    at least `right_at`.
    """
    lengths = [t.action_tokens for t in group.scored]
    if not lengths or max(lengths) == min(lengths):
        return [0.0] * len(group.trajectories)
    shortest, longest = min(lengths), max(lengths)
    paid = []
    for trajectory in group.trajectories:
        score = 0.5 - (trajectory.action_tokens - shortest) / (longest - shortest)
        is_right = trajectory.reward is not None and trajectory.reward >= right_at
        paid.append(score if is_right else min(0.0, score))
    return paid
