"""Judging a policy on held-out prompts with the engines that train it."""

from __future__ import annotations

from orchestration.metrics import Tally
from rollouts.records import Group


def evaluation_tally(groups: list[Group], pass_threshold: float, greedy: bool) -> Tally:
    """Accuracy over all responses, also of each source; a response that could not be scored counts as failed."""
    tally = Tally()
    trajectories = [t for group in groups for t in group.trajectories]
    for t in trajectories:
        passed = float(t.reward is not None and t.reward >= pass_threshold)
        tally.add("eval/accuracy", passed)
        tally.add(f"eval/accuracy/{t.prompt.source}", passed)
        if greedy:
            tally.add("eval/greedy_accuracy", passed)
        if t.reward is not None:
            tally.add("eval/reward", t.reward)
    tally.add_values("eval/response_tokens", [t.action_tokens for t in trajectories])
    tally.add_values("eval/truncated_share", [t.truncated for t in trajectories])
    tally.total("eval/errors", sum(t.reward_error is not None for t in trajectories))
    tally.total("eval/prompts", len(groups))
    return tally
