"""Decoupled PPO: what corrects for staleness is not what limits the step."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from algs import advantages
from algs.method import MethodParams, PolicyMethod, param
from algs.parts.ratio import ratio
from algs.parts.surrogate import clipped
from algs.records import Groups, PolicyTokens, TokenLoss


class DecoupledPPO(PolicyMethod):
    """Decoupled PPO objective, without a critic (Hilton et al. 2021, arXiv 2110.00641; AReaL: Fu et al. 2025, 2505.24298).

        w = sg[pi_old / mu], above behavior_cap: 0 (drop) or behavior_cap (clamp)        u = pi / pi_old
        A = (R - mean_g) / (std_g + 1e-6)
        loss = -w min(u A, clip(u, 1 - clip_low, 1 + clip_high) A)
        with dual_clip c, when A < 0: loss = min(that, w c |A|)

    PPO's ratio does two jobs: it corrects for the policy that sampled, and it keeps the new policy near. With stale
    data these are two policies: w corrects for mu, the clip is around pi_old. Use it when responses are sampled ahead
    of training. It carries its own w: an off-policy correction beside it would count mu twice.
    Differs from the paper by: a dual clip (see GRPO); w has a cap (the 2021 paper has none; AReaL's code drops the
    tokens above its own, its newest also offers to clamp); no critic: the group is in its place.
    Relatives: GRPO (this at w = 1), AIPO (one weight pi / mu, no clip), P3O (the same, capped by ESS), PPO (a critic, w
    = 1).
    """

    class Params(MethodParams):
        clip_low: float = param(
            0.2, "Ratios below 1 - clip_low give no gradient when the advantage is negative.", ge=0, lt=1
        )
        clip_high: float = param(
            0.2, "Ratios above 1 + clip_high give no gradient when the advantage is positive.", ge=0
        )
        dual_clip: float | None = param(3.0, "Ratios above this give no gradient when A < 0; empty is off.", gt=1)
        behavior_cap: float = param(5.0, "Largest w = pi_old / mu.", gt=0)
        above_cap: Literal["drop", "clamp"] = param(
            "drop", "Tokens above the cap: drop gives w = 0, clamp w = the cap."
        )

    aggregation = "token_mean"
    params: Params

    def advantages(self, groups: Groups) -> Tensor:
        return advantages.group_zscore(groups)

    def loss(self, t: PolicyTokens) -> TokenLoss:
        p = self.params
        behavior = ratio(t.old_logprobs - t.behavior_logprobs).detach()
        weight = behavior.where(behavior <= p.behavior_cap, p.behavior_cap if p.above_cap == "clamp" else 0.0)
        r = ratio(t.logprobs - t.old_logprobs)
        surrogate, metrics = clipped(r, t.advantages, p.clip_low, p.clip_high, p.dual_clip)
        behavior_metrics = {"behavior_weight": weight, "behavior_cap_fraction": (weight < behavior).float()}
        return TokenLoss(-weight * surrogate, {**metrics, **behavior_metrics})
