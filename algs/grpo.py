"""Group relative policy optimization."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from algs import advantages, kl
from algs.method import MethodParams, PolicyMethod, param
from algs.records import Groups, PolicyTokens, TokenLoss


class GRPO(PolicyMethod):
    """GRPO (Shao et al. 2024, arXiv 2402.03300, equation 3).

        r = pi / pi_old                         A = (R - mean_g) / (std_g + 1e-6)
        loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coef * KL(pi || pi_ref)

    The paper averages over each response, then over responses: `objective.aggregation: sequence_mean`.
    Differs from the paper by: separate clip bounds (DAPO's "clip higher"; equal by default, as in the paper); kl_coef 0
    by default (the paper: 0.04), so that no reference model is held; exactly zero advantage for groups without variance.
    Differs from PPO by: the group baseline in place of a critic. Dr. GRPO is this with group_mean and fixed_length.
    """

    class Params(MethodParams):
        clip_low: float = param(
            0.2, "Ratios below 1 - clip_low give no gradient when the advantage is negative.", ge=0, lt=1
        )
        clip_high: float = param(
            0.2, "Ratios above 1 + clip_high give no gradient when the advantage is positive.", ge=0
        )
        kl_coef: float = param(0.0, "Weight of KL(pi || pi_ref) in the loss; 0 holds no reference model.", ge=0)
        kl_estimator: Literal["k1", "k2", "k3"] = param("k3", "Per-token KL estimator; k3 is the paper's.")

    aggregation = "sequence_mean"
    params: Params

    def needs(self) -> frozenset[str]:
        return frozenset({"ref_logprobs"}) if self.params.kl_coef > 0 else frozenset()

    def advantages(self, groups: Groups) -> Tensor:
        return advantages.group_zscore(groups)

    def loss(self, t: PolicyTokens) -> TokenLoss:
        p = self.params
        ratio = torch.exp(t.logprobs - t.old_logprobs)
        clipped = ratio.clamp(1 - p.clip_low, 1 + p.clip_high)
        surrogate = torch.minimum(ratio * t.advantages, clipped * t.advantages)
        metrics = {"clip_fraction": (clipped * t.advantages < ratio * t.advantages).float(), "ratio": ratio}
        if t.ref_logprobs is None:
            return TokenLoss(-surrogate, metrics)
        divergence = kl.estimate(p.kl_estimator, t.logprobs, t.ref_logprobs)
        return TokenLoss(-surrogate + p.kl_coef * divergence, {**metrics, "kl_ref": divergence})
