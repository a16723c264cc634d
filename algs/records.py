"""The records of a method: whole groups for its advantage, and the action tokens of a micro-batch for its loss."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Groups:
    """The input of an advantage: the S scored trajectories of P prompts in a whole step, before it is divided.

    With a critic, the record also holds numbers for the N action tokens, trajectory after trajectory, in order.
    """

    rewards: Tensor  # [S] float32; a KL penalty placed in the reward is already in it
    group: Tensor  # [S] int64 in 0..P-1; groups may differ in size
    lengths: Tensor  # [S] int64, action tokens per trajectory; they sum to N
    truncated: Tensor | None = None  # [S] bool, whether the response was cut at the length limit
    token_rewards: Tensor | None = None  # [N] the reward on the last action token, a KL penalty on each
    values: Tensor | None = None  # [N] V of the state before each action token, at the start of the step
    final_values: Tensor | None = None  # [S] V of the state after the last action token

    def sum_by_group(self, x: Tensor) -> Tensor:
        """Return the sum of x over each group. [S] -> [P]"""
        groups = int(self.group.max()) + 1 if self.group.numel() else 0
        return x.new_zeros(groups).index_add_(0, self.group, x)

    @property
    def sizes(self) -> Tensor:
        """Return the number of trajectories in each group, [P] float32."""
        return self.sum_by_group(torch.ones_like(self.rewards))

    @property
    def sequence(self) -> Tensor:
        """Return the trajectory of each action token, [N] int64."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)


@dataclasses.dataclass(frozen=True)
class PolicyTokens:
    """The input of a loss: the N action tokens of one micro-batch, flattened, without padding and masks.

    The tokens of a trajectory are all here or none of them, in order. All `[N]` tensors are float32 unless noted. Only
    `logprobs`, `entropy` and `values` carry gradient. Per-token columns are declared here: whatever computes one,
    before the update or in the trainer, puts it into the micro-batch under the name of its field.
    """

    logprobs: Tensor  # [N] log pi, at the sampling temperature
    behavior_logprobs: Tensor  # [N] log mu, as the engine sampled
    old_logprobs: Tensor  # [N] log pi_old: the trainer's at the start of the step, or mu (objective.old_logprobs)
    advantages: Tensor  # [N]
    entropy: Tensor  # [N] in nats, at the sampling temperature
    sequence: Tensor  # [N] int64 in 0..S-1, the trajectory that a token belongs to
    group: Tensor  # [S] int64, the prompt that a trajectory belongs to
    staleness: Tensor  # [N] int64, policy versions between sampling and now
    ref_logprobs: Tensor | None = None  # [N] log pi_ref; present when the method's needs() names it
    values: Tensor | None = None  # [N] the critic's V, with gradient; present when needs() names it
    old_values: Tensor | None = None  # [N] V at the start of the step
    returns: Tensor | None = None  # [N] the target of V: the method's returns()
    chosen: Tensor | None = None  # [S] bool, in preference data: the preferred response of its pair, or a desirable one
    # The scalar sums of the method's update_sums() over every action token of the update, all micro-batches and ranks.
    update_sums: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    def sequence_sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over each trajectory. [N] -> [S]"""
        return x.new_zeros(self.group.shape[0]).index_add_(0, self.sequence, x)

    def sequence_mean(self, x: Tensor) -> Tensor:
        """Return the mean of x over each trajectory's tokens, 0 where it has none. [N] -> [S]"""
        return self.sequence_sum(x) / self.sequence_sum(torch.ones_like(x)).clamp(min=1)

    def pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x of the chosen and of the rejected response of each pair, in the order of `group`. [S] -> [P], [P]

        Raises:
            ValueError: a group is not one chosen and one rejected response.
        """
        chosen, rejected = self._pairing
        return x[chosen], x[rejected]

    def on_pair_tokens(self, x: Tensor) -> Tensor:
        """Put each pair's number on all tokens of its two responses; pairs are in the order of `group`. [P] -> [N]

        Under `prompt_mean`, which weighs a token with 1 / (P * tokens of its pair), such a loss is the mean over pairs.
        """
        chosen, rejected = self._pairing
        by_response = x.new_empty(self.group.shape[0]).index_put((chosen,), x).index_put((rejected,), x)
        return by_response[self.sequence]

    @functools.cached_property
    def _pairing(self) -> tuple[Tensor, Tensor]:
        """Return each pair's chosen and rejected trajectory, [P] each.

        This is cached, because losses need it several times and the check must wait for the device.
        """
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
    """The output of a method's loss: the loss of each token, and metrics by name.

    A metric is logged as the mean over its entries, which are tokens, responses or pairs. It is reduced as sum and
    count, never as a mean of means.
    """

    loss: Tensor  # [N] float32, minimised
    metrics: dict[str, Tensor] = dataclasses.field(
        default_factory=dict
    )  # each [N], [S] or [P]; the trainer detaches them
    critic: Tensor | None = None  # [N] float32, the value loss, minimised beside the other; never corrected off-policy


@dataclasses.dataclass(frozen=True)
class Correction:
    """The output of an off-policy correction: a factor on each token's loss, and which tokens are trained on at all."""

    weights: Tensor  # [N] float32, without gradient
    keep: Tensor  # [N] bool
