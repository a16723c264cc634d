"""Turn scored groups into packed micro-batches; compute advantages and loss weights once, on whole groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algs.method import PolicyMethod
from algs.parts import kl
from algs.parts.aggregation import token_weights
from algs.records import Groups, PolicyTokens
from configs.blocks.objective import KL
from configs.blocks.rl import RLConfig
from configs.blocks.schedule import Schedule
from configs.blocks.training import Train
from data_feeds.packing import MicroBatch, pack
from data_feeds.responses import Responses, TokenColumns
from orchestration.metrics.tally import Tally
from orchestration.trainer.token_objective import TokenObjective
from records.rollout import Group, Trajectory

# By name: one array per trajectory, a number per action token; see recomputed_columns.
Recompute = Callable[[list[Trajectory], Sequence[str]], dict[str, list[np.ndarray]]]


def prepare_updates(
    groups: list[Group], objective: TokenObjective, config: RLConfig, version: int, recompute: Recompute
) -> tuple[list[list[list[MicroBatch]]], Tally]:
    """Return the micro-batches of each update and rank, [update][rank][micro-batch], and what was left out.

    Advantages are of the whole step, whatever its number of updates; a loss weight has the denominators of its update.
    Groups are divided among the updates of a pass in order; from the second pass on, in an order drawn anew. An update
    in which nothing would have a gradient is left out. `recompute` lets the trainers compute the numbers that must be
    known before the step's first update.
    """
    train, tally = config.train, Tally()
    updates: list[list[list[MicroBatch]]] = []
    members = counted([g for g in groups if g.trained])  # what filters left out whole must not make the shares uneven
    if members:
        step = _Step(members, objective, config, version, recompute, tally)
        order, share = np.arange(len(members)), -(-len(members) // train.updates_per_step)
        for number in range(train.passes_per_batch):
            if number and train.updates_per_step == 1:
                updates += updates[:1]  # of one update a pass, each is the same
                continue
            if number:
                order = np.random.default_rng([config.run.seed, version, number]).permutation(len(members))
            shares = [order[start : start + share] for start in range(0, len(order), share)]
            packed = [step.packed(own, tally if number == 0 else Tally()) for own in shares]  # a pass counts it all
            updates += [update for update in packed if update is not None]
    tally.total("train/empty_updates", train.updates_in_step - len(updates))
    return updates, tally


def counted(groups: list[Group]) -> list[list[Trajectory]]:
    """Return the trajectories of each group that count for its advantages, without empty groups. A trajectory is in
    neither baseline nor loss if its scoring failed, a filter took it out of the baseline, or it has no action token."""
    members = [[t for t in group.baseline if np.count_nonzero(t.is_action)] for group in groups]
    return [own for own in members if own]


class _Step:
    """All that a step's updates are made of: its responses, and per-token columns with advantages among them."""

    def __init__(
        self, members: list[list[Trajectory]], objective: TokenObjective, config: RLConfig, version: int,
        recompute: Recompute, tally: Tally,
    ) -> None:  # fmt: skip
        """Compute what is the same for every update. members: the trajectories of each group."""
        self.objective, self.config = objective, config
        self.responses = responses = Responses([t for own in members for t in own])
        names = objective.recomputed_columns(config.train.updates_in_step)
        found = recompute(list(responses.trajectories), names) if names else {}
        recomputed = {name: np.concatenate(values).astype(np.float32) for name, values in found.items()}
        final_values = recomputed.pop("final_values", None)
        self.columns = columns = {**responses.columns(version), **recomputed}
        sizes = torch.tensor([len(own) for own in members])
        groups = groups_of(responses, sizes, columns, final_values, config.objective.kl)
        columns["advantages"] = advantages_of(groups, columns["behavior_logprobs"], objective.method, config)
        note_advantages(responses, columns["advantages"])
        if objective.has_values:
            returns = objective.method.returns(groups)
            columns["returns"] = returns.numpy()
            _tally_critic(groups, returns, tally)
        lengths = torch.where(torch.tensor([t.dropped_by is None for t in responses.trajectories]), groups.lengths, 0)
        if config.objective.rejected_tokens == "leave":
            lengths = torch.minimum(lengths, _kept_tokens(columns, groups, objective))
        self.group, self.lengths = groups.group, lengths  # [S] each; the tokens that count in a denominator
        self.has_gradient = np.ones(len(lengths), np.bool_)  # [S]
        if drops_zero_advantage(objective, config.train):
            starts = np.cumsum(responses.counts) - responses.counts
            self.has_gradient = np.logical_or.reduceat(columns["advantages"] != 0, starts)

    def packed(self, share: NDArray[np.integer], tally: Tally) -> list[list[MicroBatch]] | None:
        """Return the micro-batches of each rank of the update on these groups, or None if nothing has a gradient."""
        config, counts = self.config, self.responses.counts
        lengths = torch.where(torch.isin(self.group, torch.from_numpy(share)), self.lengths, 0)
        aggregation = config.objective.aggregation_mode(self.objective.method)
        weights = token_weights(aggregation, lengths, self.group, config.rollout.max_new_tokens).numpy()
        weights *= self.has_gradient
        is_packed = weights != 0
        tally.total("train/trajectories", int(is_packed.sum()))
        if not is_packed.any():
            return None
        staleness = self.columns["staleness"][np.repeat(is_packed, counts)]
        _tally_ages(staleness, counts[is_packed], config.schedule, tally)
        return pack(
            self.responses, self.group.numpy(), weights, self.columns, config.train.max_tokens_per_micro_batch,
            config.train.ranks, config.train.share_prompts,
        )  # fmt: skip


def groups_of(
    responses: Responses, sizes: Tensor, columns: TokenColumns, final_values: NDArray[np.float32] | None, penalty: KL
) -> Groups:
    """Return the input of an advantage: rewards less a KL penalty placed in them; per token too if there is a critic.

    sizes: the number of trajectories of each group, [P].
    """
    lengths = torch.from_numpy(responses.counts)
    rewards = torch.tensor([t.reward for t in responses.trajectories], dtype=torch.float32)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    known = {name: torch.from_numpy(values) for name, values in columns.items()}
    token_rewards = torch.zeros(len(sequence))
    if penalty.in_reward:
        policy = known.get("old_logprobs", known["behavior_logprobs"])
        token_rewards -= penalty.coef * kl.estimate(penalty.estimator_used, policy, known["ref_logprobs"])
    penalties = torch.zeros_like(rewards).index_add_(0, sequence, token_rewards)
    token_rewards[lengths.cumsum(0) - 1] += rewards
    return Groups(
        rewards=rewards + penalties,
        group=torch.repeat_interleave(torch.arange(len(sizes)), sizes),
        lengths=lengths,
        truncated=torch.tensor([t.truncated for t in responses.trajectories]),
        token_rewards=token_rewards,
        values=known.get("old_values"),
        final_values=None if final_values is None else torch.from_numpy(final_values),
    )


def advantages_of(
    groups: Groups, behavior_logprobs: NDArray[np.float32], method: PolicyMethod, config: RLConfig
) -> NDArray[np.float32]:
    """Return the advantage of every action token, [N].

    A reward that is Inf or NaN makes its tokens' advantages NaN whatever the method does with it, and so does an
    engine's log-probability for its token (a correction would just reject it), so that the step notices it."""
    found = config.objective.advantage_function(method)(groups).to(torch.float32)
    responses, tokens = len(groups.lengths), int(groups.lengths.sum())
    if len(found) not in (responses, tokens):
        raise ValueError(
            f"the advantage gave {len(found)} numbers for {responses} responses of {tokens} action tokens; it must give "
            "one per response or one per token"
        )
    per_token = torch.repeat_interleave(found, groups.lengths) if len(found) == responses else found
    is_finite = torch.isfinite(groups.rewards)[groups.sequence] & torch.isfinite(torch.from_numpy(behavior_logprobs))
    return torch.where(is_finite, per_token, torch.nan).numpy()


def note_advantages(responses: Responses, advantages: NDArray[np.float32]) -> None:
    """Write the mean advantage of its tokens into every trajectory, for the samples on disk and the replay buffer."""
    for trajectory, own in zip(responses.trajectories, responses.split(advantages), strict=True):
        trajectory.advantage = float(np.add.reduce(own) / np.float32(len(own)))  # np.mean takes five times as long


def drops_zero_advantage(objective: TokenObjective, train: Train) -> bool:
    """Return whether responses whose advantages are all 0, which give no gradient, are left out of the forward pass."""
    return train.drop_zero_variance_groups and objective.ignores_zero_advantage


def _tally_ages(staleness: NDArray[np.int64], counts: NDArray[np.int64], schedule: Schedule, tally: Tally) -> None:
    """Count how old the tokens are that an update trains on: all action tokens of the responses in its forward pass.

    staleness [N] of those tokens, counts [S] of the tokens of each response.
    """
    tally.add_values("train/staleness_mean", staleness)
    tally.maximum("train/staleness_max", int(staleness.max()))
    if schedule.oldest == 0:
        return
    for age in range(schedule.oldest + 1):
        tally.add_values(f"schedule/staleness/{age}", staleness == age)
    starts = np.cumsum(counts) - counts
    spans_versions = np.minimum.reduceat(staleness, starts) < np.maximum.reduceat(staleness, starts)
    tally.add_values("schedule/spanning_share", spans_versions)


def _kept_tokens(columns: TokenColumns, groups: Groups, objective: TokenObjective) -> Tensor:
    """Return the number of action tokens of each trajectory that no correction leaves out. [S] int64"""
    known: dict[str, Any] = {name: torch.from_numpy(values) for name, values in columns.items()}
    logprobs = known["old_logprobs"]
    tokens = PolicyTokens(
        logprobs=logprobs, entropy=torch.zeros_like(logprobs), sequence=groups.sequence, group=groups.group, **known
    )
    _, keep = objective.correct(tokens)
    return torch.zeros_like(groups.lengths).index_add_(0, groups.sequence, keep.long())


def _tally_critic(groups: Groups, returns: Tensor, tally: Tally) -> None:
    """Count how much of the returns' variance the values explain, exactly over the step."""
    assert groups.values is not None
    residual, target = (returns - groups.values).double(), returns.double()
    tally.add("critic/value_mean", float(groups.values.double().sum()), len(returns))
    if len(returns) > 1 and float(target.var()) > 0:
        tally.add("critic/explained_variance", 1 - float(residual.var() / target.var()))
