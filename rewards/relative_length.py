"""Reward responses for being shorter than the others of their group (Kimi k1.5, arXiv 2501.12599, section 2.3.3)."""

from __future__ import annotations

from plugins.marks import of_group
from records.rollout import Group


@of_group
def relative_length(group: Group, right_at: float = 0.5) -> list[float]:
    """Return 0.5 - (len - shortest) / (longest - shortest) for each response, but at most 0 for a wrong one.

    The values lie between 0.5 and -0.5; all are 0 when all responses are equally long. Lengths count generated tokens,
    and shortest and longest are taken over the responses that the other parts could score. A response is right when
    those parts pay it at least `right_at`.
    """
    lengths = [t.action_tokens for t in group.scored]
    if not lengths or max(lengths) == min(lengths):
        return [0.0] * len(group.trajectories)
    shortest, longest = min(lengths), max(lengths)
    scores = []
    for trajectory in group.trajectories:
        score = 0.5 - (trajectory.action_tokens - shortest) / (longest - shortest)
        is_right = trajectory.reward is not None and trajectory.reward >= right_at
        scores.append(score if is_right else min(0.0, score))
    return scores
