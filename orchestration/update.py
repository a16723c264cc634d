"""From scored groups to packed micro-batches: advantages and loss weights are made here, on whole groups, once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from algs.aggregation import token_weights
from algs.method import PolicyMethod
from algs.records import Groups, PolicyTokens
from configs.schema import RLConfig
from data_feeds.packing import MicroBatch, pack
from orchestration.metrics import Tally
from rollouts.records import Group, Trajectory


@dataclass(frozen=True)
class ScoredBatch:
    """The scored trajectories of some groups as tensors. S trajectories of P groups that have at least one."""

    trajectories: list[Trajectory]
    groups: Groups
    advantages: torch.Tensor  # [S]

    @classmethod
    def of(cls, groups: list[Group], method: PolicyMethod) -> ScoredBatch:
        """Trajectories whose scoring failed are in neither the baseline nor the loss."""
        scored = [g.scored for g in groups if g.scored]
        trajectories = [t for group in scored for t in group]
        records = Groups(
            rewards=torch.tensor([t.reward for t in trajectories], dtype=torch.float32),
            group=torch.repeat_interleave(
                torch.arange(len(scored)), torch.tensor([len(g) for g in scored], dtype=torch.int64)
            ),
            lengths=torch.tensor([t.action_tokens for t in trajectories]),
        )
        advantages = method.advantages(records) if trajectories else torch.zeros(0)
        if not torch.isfinite(advantages).all():
            raise ValueError(f"{type(method).__name__}.advantages gave a non-finite advantage")
        for trajectory, advantage in zip(trajectories, advantages.tolist(), strict=True):
            trajectory.advantage = advantage
        return cls(trajectories, records, advantages)


def prepare_updates(
    groups: list[Group], method: PolicyMethod, config: RLConfig, version: int
) -> tuple[list[list[list[MicroBatch]]], Tally]:
    """Micro-batches of each optimizer step and rank, [update][rank][micro-batch], and what was left out.

    Groups are dealt to the step's updates in order. An update in which nothing would have a gradient is left out.
    """
    updates, tally = [], Tally()
    share = -(-len(groups) // config.train.updates_per_step)
    for start in range(0, len(groups), share):
        batch = ScoredBatch.of(groups[start : start + share], method)
        packed = _pack(batch, method, config, version, tally)
        if packed is not None:
            updates.append(packed)
    tally.total("train/empty_updates", config.train.updates_per_step - len(updates))
    return updates, tally


def _pack(
    batch: ScoredBatch, method: PolicyMethod, config: RLConfig, version: int, tally: Tally
) -> list[list[MicroBatch]] | None:
    train = config.train
    aggregation = config.objective.aggregation or method.aggregation
    weights = token_weights(aggregation, batch.groups.lengths, batch.groups.group, config.rollout.max_new_tokens)
    keep = (weights > 0).numpy()
    if train.drop_zero_variance_groups and silent_at_zero_advantage(method):
        keep &= (batch.advantages != 0).numpy()
    chosen = np.flatnonzero(keep)
    tally.total("train/trajectories", len(chosen))
    if len(chosen) == 0:
        return None
    return pack(
        trajectories=[batch.trajectories[i] for i in chosen],
        groups=batch.groups.group.numpy()[chosen],
        advantages=batch.advantages.numpy()[chosen],
        loss_weights=weights.numpy()[chosen],
        version=version,
        max_tokens=train.max_tokens_per_micro_batch,
        ranks=train.ranks,
        share_prompts=train.share_prompts,
    )


def silent_at_zero_advantage(method: PolicyMethod) -> bool:
    """Whether a token with advantage 0 gives no gradient under this method and its parameters.

    Asked of the loss itself, on made-up tokens, so that an author need not declare it: a KL term or an entropy bonus
    acts on every token, and then nothing may be left out of the forward pass.
    """
    logprobs = torch.tensor([-0.1, -2.0, -1.0, -5.0], requires_grad=True)
    entropy = torch.tensor([0.3, 1.0, 0.7, 2.0], requires_grad=True)
    other = torch.tensor([-0.2, -1.0, -1.5, -2.0])
    tokens = PolicyTokens(
        logprobs=logprobs,
        behavior_logprobs=other,
        old_logprobs=other,
        advantages=torch.zeros(4),
        entropy=entropy,
        sequence=torch.tensor([0, 0, 1, 1]),
        group=torch.tensor([0, 0]),
        staleness=torch.zeros(4, dtype=torch.int64),
        ref_logprobs=other - 0.5,
    )
    loss = method.loss(tokens).values.sum()
    if not loss.requires_grad:
        return True
    gradients = torch.autograd.grad(loss, (logprobs, entropy), allow_unused=True)
    return all(g is None or not g.any() for g in gradients)
