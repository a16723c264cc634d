"""Lite PPO: the group's mean, the step's spread."""

from __future__ import annotations

from torch import Tensor

from algs import advantages
from algs.method import MethodParams, PolicyMethod, param
from algs.parts.ratio import ratio
from algs.parts.surrogate import clipped
from algs.records import Groups, PolicyTokens, TokenLoss


class LitePPO(PolicyMethod):
    """Lite PPO (Liu et al. 2025, arXiv 2508.08221).

        r = pi / pi_old
        A = (R - mean_g) / std of all R of the step
        loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)     with dual_clip c, when A < 0: min(that, c |A|)

    Two tricks are enough, says the paper: the mean from the group with the spread from the whole batch, and averaging
    over all tokens. One spread for the step does not blow up the advantages of groups that are nearly all right or all
    wrong. There is no critic, in spite of the name.
    Differs from the paper by: a dual clip (see GRPO); no small constant under the division; a step whose rewards are
    all equal gets exactly 0.
    Relatives: DAPO (divides by std_g), ScaleRL (spread of R - mean_g, caps the weight), ReinforcePlusPlus (mean of the
    step too), DrGRPO (no division).
    """

    class Params(MethodParams):
        clip_low: float = param(
            0.2, "Ratios below 1 - clip_low give no gradient when the advantage is negative.", ge=0, lt=1
        )
        clip_high: float = param(
            0.2, "Ratios above 1 + clip_high give no gradient when the advantage is positive.", ge=0
        )
        dual_clip: float | None = param(3.0, "Ratios above this give no gradient when A < 0; empty is off.", gt=1)

    aggregation = "token_mean"
    params: Params

    def advantages(self, groups: Groups) -> Tensor:
        return advantages.lite_ppo(groups)

    def loss(self, t: PolicyTokens) -> TokenLoss:
        p = self.params
        r = ratio(t.logprobs - t.old_logprobs)
        surrogate, metrics = clipped(r, t.advantages, p.clip_low, p.clip_high, p.dual_clip)
        return TokenLoss(-surrogate, metrics)
