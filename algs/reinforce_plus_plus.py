"""REINFORCE++: one baseline and one spread for the whole step."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from algs import advantages
from algs.method import MethodParams, PolicyMethod, param
from algs.parts.ratio import ratio
from algs.parts.surrogate import clipped
from algs.records import Groups, PolicyTokens, TokenLoss


class ReinforcePlusPlus(PolicyMethod):
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262).

        r = pi / pi_old
        A = (R - mean of the step) / (std of the step + 1e-8)
        loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)     with dual_clip c, when A < 0: min(that, c |A|)

    The method normalises over the whole step, so one response per prompt is enough.
    Differs from the paper by: a dual clip (see GRPO); mean and std are over responses by default, where the paper's
    code takes them over tokens (`normalise_over: tokens`); the KL to the reference, in the paper's reward, is
    `objective.kl` with `placement: reward` (R is then the reward less the penalties from a token on, as there); a step
    without spread gets 0.
    Relatives: ReinforcePlusPlusBaseline (the group's mean goes first), GRPO (mean and std of each group), PPO (a
    critic, whitened GAE), REINFORCE (no division, no clip).
    """

    class Params(MethodParams):
        clip_low: float = param(
            0.2, "Ratios below 1 - clip_low give no gradient when the advantage is negative.", ge=0, lt=1
        )
        clip_high: float = param(
            0.2, "Ratios above 1 + clip_high give no gradient when the advantage is positive.", ge=0
        )
        dual_clip: float | None = param(3.0, "Ratios above this give no gradient when A < 0; empty is off.", gt=1)
        normalise_over: Literal["responses", "tokens"] = param(
            "responses", "What mean and std are over; tokens: long responses count more, as in the authors' code."
        )

    aggregation = "token_mean"
    params: Params

    def advantages(self, groups: Groups) -> Tensor:
        return advantages.reinforce_plus_plus(groups, self.params.normalise_over)

    def loss(self, t: PolicyTokens) -> TokenLoss:
        p = self.params
        r = ratio(t.logprobs - t.old_logprobs)
        surrogate, metrics = clipped(r, t.advantages, p.clip_low, p.clip_high, p.dual_clip)
        return TokenLoss(-surrogate, metrics)
