"""Proximal policy optimization with a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from algs import advantages
from algs.method import MethodParams, PolicyMethod, param
from algs.parts.gae import gae
from algs.parts.ratio import ratio
from algs.parts.surrogate import clipped
from algs.records import Groups, PolicyTokens, TokenLoss


class PPO(PolicyMethod):
    """Proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347, equation 7).

        r = pi / pi_old
        A = GAE(discount, gae_lambda), whitened over the step        R = GAE + V_old
        loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)     with dual_clip c, when A < 0: min(that, c |A|)
        critic = vf_coef / 2 max((V - R)^2, (clip(V, V_old - vf_clip, V_old + vf_clip) - R)^2)

    A critic judges every token, so tokens of one response differ in advantage and one response per prompt is enough. It
    costs a second model; give the critic a few steps ahead (`critic.warmup_steps`) before its values are trusted.
    Differs from the paper by: separate clip bounds; discount 1 (the paper: 0.99); value clipping and whitening, which
    are the authors' code's; dual clip (arXiv 1912.09729), off by default; the entropy bonus is
    `objective.entropy_coef`.
    Relatives: GRPO (the group in place of the critic), ReinforcePlusPlus (no critic, whitened over the step),
    DecoupledPPO (corrects for stale data).
    """

    class Params(MethodParams):
        clip_low: float = param(
            0.2, "Ratios below 1 - clip_low give no gradient when the advantage is negative.", ge=0, lt=1
        )
        clip_high: float = param(
            0.2, "Ratios above 1 + clip_high give no gradient when the advantage is positive.", ge=0
        )
        dual_clip: float | None = param(None, "Ratios above this give no gradient when A < 0; empty is off.", gt=1)
        vf_coef: float = param(0.5, "Weight of the value loss, which has its own 1/2: 0.5 is 0.25 (V - R)^2.", ge=0)
        vf_clip: float | None = param(0.2, "How far V may move per step before its loss is flat; empty is off.", gt=0)
        discount: float = param(1.0, "Discount per token.", ge=0, le=1)
        gae_lambda: float = param(0.95, "1: sum of rewards minus V. 0: one-step error.", ge=0, le=1)
        bootstrap_truncated: bool = param(
            False, "A response cut at the length limit is worth V of where it was cut; false: the limit ends it."
        )
        whiten: bool = param(True, "Advantages of mean 0 and std 1 over the step's tokens.")

    aggregation = "token_mean"
    params: Params

    def needs(self) -> frozenset[str]:
        return frozenset({"values"})

    def advantages(self, groups: Groups) -> Tensor:
        return advantages.whiten(self._gae(groups)) if self.params.whiten else self._gae(groups)

    def returns(self, groups: Groups) -> Tensor:
        assert groups.values is not None
        return self._gae(groups) + groups.values

    def _gae(self, groups: Groups) -> Tensor:
        return gae(groups, self.params.discount, self.params.gae_lambda, self.params.bootstrap_truncated)

    def loss(self, t: PolicyTokens) -> TokenLoss:
        p = self.params
        r = ratio(t.logprobs - t.old_logprobs)
        surrogate, metrics = clipped(r, t.advantages, p.clip_low, p.clip_high, p.dual_clip)
        assert t.values is not None and t.old_values is not None and t.returns is not None
        error = (t.values - t.returns).square()
        if p.vf_clip is not None:
            near = t.values.clamp(t.old_values - p.vf_clip, t.old_values + p.vf_clip)
            flat = (near - t.returns).square()
            metrics["value_clip_fraction"] = (flat > error).float()
            error = torch.maximum(error, flat)
        return TokenLoss(-surrogate, metrics, critic=p.vf_coef * 0.5 * error)
