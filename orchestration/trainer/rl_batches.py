"""From scored groups to packed micro-batches: advantages and loss weights are made here, on whole groups, once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from algs.method import PolicyMethod
from algs.parts import kl
from algs.parts.aggregation import token_weights
from algs.records import Groups, PolicyTokens
from configs.blocks.rl import RLConfig
from configs.blocks.schedule import Schedule
from configs.blocks.training import Train
from data_feeds.packing import MicroBatch, pack
from orchestration.metrics.tally import Tally
from orchestration.trainer.token_objective import TokenObjective
from plugins.components import advantage_for, aggregation_for
from records.rollout import Group, Trajectory

Columns = dict[str, list[np.ndarray]]  # by name: one array per trajectory, a number per action token
Recompute = Callable[[list[Trajectory], Sequence[str]], Columns]


@dataclass(frozen=True)
class ScoredBatch:
    """The trajectories of an optimizer step that count for its advantages: S of P groups that have at least one."""

    trajectories: list[Trajectory]
    group: Tensor  # [S] int64 in 0..P-1
    recompute: Columns = field(default_factory=dict)  # see TokenObjective.recomputed_columns

    @classmethod
    def of(cls, groups: list[Group]) -> ScoredBatch:
        """Trajectories whose scoring failed, that a filter took out of the baseline, or without a single action token are in
        neither baseline nor loss."""
        counted = [[t for t in g.baseline if np.count_nonzero(t.is_action)] for g in groups]
        counted = [g for g in counted if g]
        sizes = torch.tensor([len(g) for g in counted], dtype=torch.int64)
        return cls([t for g in counted for t in g], torch.repeat_interleave(torch.arange(len(counted)), sizes))

    def column(self, name: str) -> Tensor:
        """A frozen column over all action tokens, trajectory after trajectory. [N] float32"""
        return torch.from_numpy(np.concatenate(self.recompute[name]).astype(np.float32))

    @functools.cached_property
    def is_action(self) -> np.ndarray:
        """Of all tokens, trajectory after trajectory. Laid end to end they cost one call, not one a response."""
        return np.concatenate([t.is_action for t in self.trajectories])

    @functools.cached_property
    def behavior_logprobs(self) -> Tensor:
        """Of all action tokens. [N]"""
        return torch.from_numpy(np.concatenate([t.behavior_logprobs for t in self.trajectories])[self.is_action])

    @property
    def versions(self) -> np.ndarray:
        """Of all action tokens. [N] int32"""
        return np.concatenate([t.versions for t in self.trajectories])[self.is_action]

    def groups(self, config: RLConfig) -> Groups:
        """What an advantage sees: rewards less a KL penalty placed in them; per token too where there is a critic."""
        lengths = torch.tensor([np.count_nonzero(t.is_action) for t in self.trajectories])
        rewards = torch.tensor([t.reward for t in self.trajectories], dtype=torch.float32)
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        token_rewards = torch.zeros(int(lengths.sum()))
        leash = config.objective.kl
        if leash.coef > 0 and leash.placement == "reward":
            policy = self.column("old_logprobs") if "old_logprobs" in self.recompute else self.behavior_logprobs
            token_rewards -= leash.coef * kl.estimate(leash.estimator, policy, self.column("ref_logprobs"))
        penalties = torch.zeros_like(rewards).index_add_(0, sequence, token_rewards)
        token_rewards[lengths.cumsum(0) - 1] += rewards
        has_values = "old_values" in self.recompute
        return Groups(
            rewards=rewards + penalties,
            group=self.group,
            lengths=lengths,
            truncated=torch.tensor([t.truncated for t in self.trajectories]),
            token_rewards=token_rewards,
            values=self.column("old_values") if has_values else None,
            final_values=self.column("final_values") if has_values else None,
        )


def prepare_updates(
    groups: list[Group], method: PolicyMethod, config: RLConfig, version: int, recompute: Recompute
) -> tuple[list[list[list[MicroBatch]]], Tally]:
    """Micro-batches of each optimizer step and rank, [update][rank][micro-batch], and what was left out.

    Groups are dealt to the step's updates in order. An update in which nothing would have a gradient is left out.
    `frozen` asks the trainers for what must be known before the step's first update.
    """
    updates, tally = [], Tally()
    groups = [g for g in groups if g.trained]  # what filters left out whole must not make the shares uneven
    objective = TokenObjective(method, config.objective)
    names = objective.recomputed_columns(config.train.updates_per_step)
    share = max(1, -(-len(groups) // config.train.updates_per_step))
    batches = [ScoredBatch.of(groups[start : start + share]) for start in range(0, len(groups), share)]
    batches = _with_recomputed([b for b in batches if b.trajectories], names, recompute)
    for batch in batches:
        packed = _pack(batch, objective, config, version, tally)
        if packed is not None:
            updates.append(packed)
    tally.total("train/empty_updates", config.train.updates_per_step - len(updates))
    return updates, tally


def _with_recomputed(batches: list[ScoredBatch], names: Sequence[str], recompute: Recompute) -> list[ScoredBatch]:
    """One call for all updates: everything is computed with the weights at the start of the step."""
    if not names or not batches:
        return batches
    columns = recompute([t for batch in batches for t in batch.trajectories], names)
    start, filled = 0, []
    for batch in batches:
        end = start + len(batch.trajectories)
        filled.append(
            dataclasses.replace(batch, recompute={name: values[start:end] for name, values in columns.items()})
        )
        start = end
    return filled


def advantages_of(batch: ScoredBatch, groups: Groups, method: PolicyMethod, config: RLConfig) -> list[np.ndarray]:
    """Advantage of every action token, an array per trajectory. Trajectories get theirs (its mean) noted.

    A reward that is Inf or NaN makes its tokens' advantages NaN whatever the method does with it, and so does an engine's
    log-probability that of its token (a correction would just reject it): the step must see it.
    """
    found = advantage_for(config, method)(groups).to(torch.float32)
    responses, tokens = len(groups.lengths), int(groups.lengths.sum())
    if len(found) not in (responses, tokens):
        raise ValueError(
            f"the advantage gave {len(found)} numbers for {responses} responses of {tokens} action tokens; it must give "
            "one per response or one per token"
        )
    per_token = torch.repeat_interleave(found, groups.lengths) if len(found) == responses else found
    is_sound = torch.isfinite(groups.rewards)[groups.sequence] & torch.isfinite(batch.behavior_logprobs)
    per_token = torch.where(is_sound, per_token, torch.nan)
    split = _split(per_token, groups)
    for trajectory, values in zip(batch.trajectories, split, strict=True):
        trajectory.advantage = float(
            np.add.reduce(values) / np.float32(len(values))
        )  # the mean, in a fifth of its time
    return split


def _split(values: Tensor, groups: Groups) -> list[np.ndarray]:
    """Numbers of all action tokens, [N], as an array per trajectory."""
    array, ends = values.numpy(), groups.lengths.cumsum(0).tolist()
    return [array[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _pack(
    batch: ScoredBatch, objective: TokenObjective, config: RLConfig, version: int, tally: Tally
) -> list[list[MicroBatch]] | None:
    train, method = config.train, objective.method
    groups = batch.groups(config)
    advantages = advantages_of(batch, groups, method, config)
    columns = {name: values for name, values in batch.recompute.items() if name != "final_values"}
    if objective.has_values:
        returns = method.returns(groups)
        columns["returns"] = _split(returns, groups)
        _tell_critic(groups, returns, tally)
    lengths = torch.where(torch.tensor([t.dropped_by is None for t in batch.trajectories]), groups.lengths, 0)
    if config.objective.rejected_tokens == "leave":
        lengths = torch.minimum(lengths, _kept_tokens(batch, groups, objective, version))
    aggregation = aggregation_for(config.objective, method)
    weights = token_weights(aggregation, lengths, groups.group, config.rollout.max_new_tokens).numpy()
    keep = weights > 0
    if drops_silent(objective, train):
        keep &= np.logical_or.reduceat(
            np.concatenate(advantages) != 0, (groups.lengths.cumsum(0) - groups.lengths).numpy()
        )
    chosen = np.flatnonzero(keep)
    tally.total("train/trajectories", len(chosen))
    if len(chosen) == 0:
        return None
    trajectories = [batch.trajectories[i] for i in chosen]
    _tally_ages(trajectories, config.schedule, version, tally)
    return pack(
        trajectories=trajectories,
        groups=groups.group.numpy()[chosen],
        advantages=[advantages[i] for i in chosen],
        loss_weights=weights[chosen],
        version=version,
        max_tokens=train.max_tokens_per_micro_batch,
        ranks=train.ranks,
        share_prompts=train.share_prompts,
        columns={name: [values[i] for i in chosen] for name, values in columns.items()},
    )


def drops_silent(objective: TokenObjective, train: Train) -> bool:
    """Whether responses whose advantages are all 0 are left out of the forward pass: they would give no gradient."""
    return train.drop_zero_variance_groups and objective.is_silent_at_zero_advantage()


def _tally_ages(trajectories: list[Trajectory], schedule: Schedule, version: int, tally: Tally) -> None:
    """How old the tokens are that an optimizer step trains on: all action tokens of the responses in its forward pass."""
    is_action = np.concatenate([t.is_action for t in trajectories])
    versions = np.concatenate([t.versions for t in trajectories])[is_action]
    staleness = version - versions
    tally.add_values("train/staleness_mean", staleness)
    tally.maximum("train/staleness_max", int(staleness.max()))
    if schedule.oldest == 0:
        return
    for age in range(schedule.oldest + 1):
        tally.add_values(f"schedule/staleness/{age}", staleness == age)
    ends = np.cumsum([t.action_tokens for t in trajectories])
    starts = np.concatenate([[0], ends[:-1]])
    tally.add_values(
        "schedule/spanning_share", np.minimum.reduceat(versions, starts) < np.maximum.reduceat(versions, starts)
    )


def _kept_tokens(batch: ScoredBatch, groups: Groups, objective: TokenObjective, version: int) -> Tensor:
    """Action tokens of each trajectory that no correction leaves out. [S] int64"""
    old = batch.column("old_logprobs")
    zeros = torch.zeros_like(old)
    tokens = PolicyTokens(
        logprobs=old, behavior_logprobs=batch.behavior_logprobs, old_logprobs=old, advantages=zeros, entropy=zeros,
        sequence=groups.sequence, group=groups.group, staleness=torch.from_numpy(version - batch.versions.astype(np.int64)),
    )  # fmt: skip
    _, keep = objective.correct(tokens)
    return torch.zeros_like(groups.lengths).index_add_(0, groups.sequence, keep.long())


def _tell_critic(groups: Groups, returns: Tensor, tally: Tally) -> None:
    """How much of the returns' variance the values explain, exactly over the optimizer step."""
    assert groups.values is not None
    residual, target = (returns - groups.values).double(), returns.double()
    tally.add("critic/value_mean", float(groups.values.double().sum()), len(returns))
    if len(returns) > 1 and float(target.var()) > 0:
        tally.add("critic/explained_variance", 1 - float(residual.var() / target.var()))
