"""Measure the responses of a step or an evaluation, and check that enough of them could be scored."""

from __future__ import annotations

import numpy as np

from configs.blocks.rl import Reward
from orchestration.metrics.tally import Tally
from records.rollout import Group, Trajectory, paid_alike


class RewardFailures(RuntimeError):
    """The error that ends a run in which too many responses of a step could not be scored."""


def rollout_tally(groups: list[Group], pass_threshold: float) -> Tally:
    """Return the metrics of a step's responses: rewards over the scored ones, lengths over all.

    Without any response only the counts are present. A step has none when filters left out more groups than may be
    replaced.
    """
    tally = Tally()
    trajectories = [t for group in groups for t in group.trajectories]
    scored = [t for t in trajectories if t.reward is not None]
    rewards = np.array([t.reward for t in scored], dtype=np.float64)
    tally.add_values("reward/mean", rewards)
    tally.add_values("reward/pass_rate", rewards >= pass_threshold)
    for trajectory in scored:
        for part, value in trajectory.reward_parts.items():
            tally.add(f"reward/{part}", value)
    errors = sum(t.reward_error is not None for t in trajectories)
    tally.total("reward/errors", errors)
    tally.add("reward/error_rate", errors, len(trajectories))
    tally.add_values("rollout/response_tokens", [t.action_tokens for t in trajectories])
    if trajectories:
        tally.maximum("rollout/response_tokens_max", max(t.action_tokens for t in trajectories))
    tally.add_values("rollout/prompt_tokens", [len(t.prompt_ids) for t in trajectories])
    tally.add_values("rollout/truncated_share", [t.truncated for t in trajectories])
    tally.add_values("rollout/aborted_share", [t.finish_reason == "abort" for t in trajectories])
    tally.total("rollout/responses", len(trajectories))
    tally.total("rollout/tokens", sum(t.action_tokens for t in trajectories))
    logprobs = [t.behavior_logprobs[t.is_action] for t in trajectories]
    tally.add_values("rollout/entropy_nats", -np.concatenate(logprobs) if logprobs else [])
    zero_variance = sum(bool(g.scored) and paid_alike(g.scored) for g in groups)
    tally.total("rollout/zero_variance_groups", zero_variance)
    tally.add("rollout/zero_variance_share", zero_variance, len(groups))
    return tally


def refuse_failed_rewards(trajectories: list[Trajectory], reward: Reward) -> None:
    """Raise RewardFailures, with the first error, when more than reward.max_error_rate could not be scored."""
    failed = [t for t in trajectories if t.reward_error is not None]
    if len(failed) > reward.max_error_rate * len(trajectories):
        raise RewardFailures(
            f"{len(failed)} of {len(trajectories)} responses could not be scored, more than reward.max_error_rate = "
            f"{reward.max_error_rate:g} allows. The first error (prompt {failed[0].prompt.prompt_id}, response "
            f"{failed[0].response!r}):\n{failed[0].reward_error}"
        )


def evaluation_tally(groups: list[Group], pass_threshold: float, greedy: bool) -> Tally:
    """Return the metrics of an evaluation. A response that could not be scored counts as failed."""
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
