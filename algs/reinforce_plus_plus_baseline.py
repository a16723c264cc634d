"""REINFORCE++-baseline: each group's mean as baseline, one spread for the whole step."""

from __future__ import annotations

from torch import Tensor

from algs import advantages
from algs.method import MethodParams, PolicyMethod, param
from algs.parts.ratio import ratio
from algs.parts.surrogate import clipped
from algs.records import Groups, PolicyTokens, TokenLoss


class ReinforcePlusPlusBaseline(PolicyMethod):
    """REINFORCE++-baseline (Hu et al. 2025, arXiv 2501.03262).

        r = pi / pi_old
        A = (R - mean_g) / (std of all R - mean_g of the step + 1e-8)
        loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)     with dual_clip c, when A < 0: min(that, c |A|)

    REINFORCE++ for several responses per prompt: the group's mean is the baseline, so that easy prompts are not
    rewarded for being easy, and the scale is still the whole step's, so that no group is weighed up for its small
    spread.
    Differs from the paper by: a dual clip (see GRPO); mean and std are over responses, where the paper's code takes
    them over tokens; the KL to the reference, in the paper's loss, is `objective.kl` with `estimator: k2`; a group of
    one and a step without spread get 0.
    Relatives: ReinforcePlusPlus (the step's mean as baseline), GRPO (std of each group), LitePPO (std of all R),
    ScaleRL (the same but for n in place of n - 1; caps the weight).
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
        return advantages.reinforce_plus_plus_baseline(groups)

    def loss(self, t: PolicyTokens) -> TokenLoss:
        p = self.params
        r = ratio(t.logprobs - t.old_logprobs)
        surrogate, metrics = clipped(r, t.advantages, p.clip_low, p.clip_high, p.dual_clip)
        return TokenLoss(-surrogate, metrics)
