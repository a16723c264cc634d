"""The records a method meets: whole groups for its advantage, the action tokens of a micro-batch for its loss."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Groups:
    """What an advantage sees: S scored trajectories of P prompts, the whole optimizer step, before any sharding or
    packing.

    With a critic the N action tokens are there too, trajectory after trajectory, in order.
    """

    rewards: Tensor  # [S] float32; a KL penalty placed in the reward is already in it
    group: Tensor  # [S] int64 in 0..P-1; groups may be ragged
    lengths: Tensor  # [S] int64, action tokens per trajectory; they sum to N
    truncated: Tensor | None = None  # [S] bool, cut at the length limit
    token_rewards: Tensor | None = None  # [N] the reward on the last action token, a KL penalty on each
    values: Tensor | None = None  # [N] V of the state before each action token, at the start of the step
    final_values: Tensor | None = None  # [S] V of the state after the last action token

    def sum_by_group(self, x: Tensor) -> Tensor:
        """Sum over each group. x [S] -> [P]."""
        groups = int(self.group.max()) + 1 if self.group.numel() else 0
        return x.new_zeros(groups).index_add_(0, self.group, x)

    @property
    def sizes(self) -> Tensor:
        """Trajectories per group, [P] float32."""
        return self.sum_by_group(torch.ones_like(self.rewards))

    @property
    def sequence(self) -> Tensor:
        """The trajectory of each action token, [N] int64."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)


@dataclasses.dataclass(frozen=True)
class PolicyTokens:
    """What a loss sees: the N action tokens of one micro-batch, flattened. There is no padding and no mask here.

    A trajectory's tokens are all here or none, in order. All `[N]` tensors are float32 unless noted. Only `logprobs`,
    `entropy` and `values` carry gradient. This is where a number per token is declared: what computes it, before the
    update or in the trainer, puts it into the micro-batch's columns under its name here."""

    logprobs: Tensor  # [N] log pi, at the sampling temperature
    behavior_logprobs: Tensor  # [N] log mu, as the engine sampled them
    old_logprobs: Tensor  # [N] log pi_old: the trainer's at the start of the step, or mu (objective.old_logprobs)
    advantages: Tensor  # [N]
    entropy: Tensor  # [N] in nats, at the sampling temperature
    sequence: Tensor  # [N] int64 in 0..S-1, the trajectory a token belongs to
    group: Tensor  # [S] int64, the prompt a trajectory belongs to
    staleness: Tensor  # [N] int64, policy versions between sampling and now
    ref_logprobs: Tensor | None = None  # [N] log pi_ref; present when the method's needs() names it
    values: Tensor | None = None  # [N] the critic's V, with gradient; present when needs() names it
    old_values: Tensor | None = None  # [N] V at the start of the step
    returns: Tensor | None = None  # [N] what V should have been: the method's returns()
    chosen: Tensor | None = None  # [S] bool; preference data: the preferred response of its pair, or a desirable one
    update_sums: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    # the method's update_sums() over every action token of the optimizer step, all micro-batches and ranks; each a
    # scalar

    def sequence_sum(self, x: Tensor) -> Tensor:
        """Sum over each trajectory. x [N] -> [S]."""
        return x.new_zeros(self.group.shape[0]).index_add_(0, self.sequence, x)

    def sequence_mean(self, x: Tensor) -> Tensor:
        """Mean over each trajectory's tokens. x [N] -> [S]; a trajectory with no token here gives 0."""
        return self.sequence_sum(x) / self.sequence_sum(torch.ones_like(x)).clamp(min=1)

    def pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen and the rejected response's number of each pair. x [S] -> [P], [P], pairs in the order of `group`.

        Raises:
            ValueError: a group is not one chosen and one rejected response.
        """
        chosen, rejected = self._pairing
        return x[chosen], x[rejected]

    def on_pair_tokens(self, x: Tensor) -> Tensor:
        """Each pair's number on all tokens of its two responses. x [P], pairs in the order of `group` -> [N]

        Under `prompt_mean`, which weighs a token with 1 / (P * tokens of its pair), such a loss is the mean over pairs.
        """
        chosen, rejected = self._pairing
        of_responses = x.new_empty(self.group.shape[0]).index_put((chosen,), x).index_put((rejected,), x)
        return of_responses[self.sequence]

    @functools.cached_property
    def _pairing(self) -> tuple[Tensor, Tensor]:
        """Each pair's chosen and rejected trajectory, [P] each. Kept: losses ask several times, and whether the pairs
        are whole is an answer that the device must be waited for."""
        assert self.chosen is not None, "these are no preference data"
        order = (2 * self.group + ~self.chosen).argsort()
        chosen, rejected = order[0::2], order[1::2]
        if len(order) % 2 or not bool(
            ((self.group[chosen] == self.group[rejected]) & self.chosen[chosen] & ~self.chosen[rejected]).all()
        ):
            raise ValueError("every pair must be one chosen and one rejected response, in one micro-batch")
        return chosen, rejected


@dataclasses.dataclass(frozen=True)
class TokenLoss:
    """A method's answer: the loss of each token, and named metrics, which are means over whatever they have one entry
    of: tokens, responses or pairs (reduced as sum and count, never as means of means)."""

    loss: Tensor  # [N] float32, minimised
    metrics: dict[str, Tensor] = dataclasses.field(
        default_factory=dict
    )  # each [N], [S] or [P]; detached by the trainer
    critic: Tensor | None = None  # [N] float32, the value loss, minimised beside it; never corrected off-policy


@dataclasses.dataclass(frozen=True)
class Correction:
    """An off-policy correction's answer: the factor on each token's loss, and which tokens are trained on at all."""

    weights: Tensor  # [N] float32, without gradient
    keep: Tensor  # [N] bool
