"""Policy-on policy-off policy optimization."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from algs import advantages
from algs.method import MethodParams, PolicyMethod, param
from algs.parts.ratio import ratio, ratio_minus_one
from algs.records import Groups, PolicyTokens, TokenLoss


class P3O(PolicyMethod):
    """Policy-on policy-off policy optimization (Fakoor et al. 2026, arXiv 2605.12380; before: 2019, 1905.01756).

        rho = pi / mu                                       A = (R - mean_g) / (std_g + 1e-6)
        ESS = (sum rho)^2 / (N sum rho^2), over all N action tokens of the update
        loss = -sg[min(rho, ESS)] A log pi + (1 - ESS) KL
        KL = rho log rho - rho + 1 (reverse, KL(pi || mu)) or rho - 1 - log rho (forward, KL(mu || pi))
             or 1 / rho - 1 + log rho (k3)

    The effective sample size says how far the policy has moved from the data; it sets both the cap on the weights and
    the pull back to mu, so there is nothing to tune. Use it with stale or mixed data. On tokens sampled from mu the
    reverse and the forward term have the exact gradient of their divergence; k3 has neither's. An off-policy correction
    beside it would count mu twice.
    Differs from the paper by: at ESS = 1 (all rho = 1) the gradient is exactly REINFORCE's, where the 2019 code set the
    cap to 1e-7; the 2019 paper has a critic, mixes in a separate on-policy batch and uses the forward KL. Another
    method is called P3O too (pairwise, arXiv 2310.00212); it is not this one.
    Differs from the authors' code by: the KL term. Theirs is k3, whose weight on grad log pi is 1 - 1 / rho where the
    reverse KL's is rho log rho: 13 times less at rho = 6, 39 times more at 0.1. `kl_direction: k3` is theirs but for
    their bound of 10 on -log rho, past which the pull would turn away from mu.
    Relatives: AIPO (fixed cap, no KL), CISPO (fixed cap on pi / pi_old), REINFORCE (this at ESS = 1), DecoupledPPO
    (clips against pi_old).
    """

    class Params(MethodParams):
        kl_direction: Literal["reverse", "forward", "k3"] = param(
            "reverse", "reverse: KL(pi || mu). forward: KL(mu || pi). k3: the authors' code, neither's gradient."
        )

    aggregation = "token_mean"
    params: Params

    def advantages(self, groups: Groups) -> Tensor:
        return advantages.group_zscore(groups)

    def update_sums(self, t: PolicyTokens) -> dict[str, Tensor]:
        rho = ratio(t.logprobs - t.behavior_logprobs)
        return {"rho": rho, "rho_squared": rho.square(), "tokens": torch.ones_like(rho)}

    def loss(self, t: PolicyTokens) -> TokenLoss:
        p, s = self.params, t.update_sums
        log_rho = t.logprobs - t.behavior_logprobs
        rho = ratio(log_rho)
        # Only rounding can put it above 1, and that would turn the KL term's sign. If every rho is 0, so is the ESS.
        ess = (s["rho"].square() / (s["tokens"] * s["rho_squared"]).clamp(min=1e-30)).detach().clamp(max=1)
        weight = rho.detach().clamp(max=ess)
        moved = ratio_minus_one(log_rho)  # rho - 1, which float32 would round away next to mu
        if p.kl_direction == "k3":
            kl = ratio_minus_one(-log_rho) + log_rho
        else:
            kl = rho * log_rho - moved if p.kl_direction == "reverse" else moved - log_rho
        metrics = {
            "clip_fraction": (weight < rho).float(),
            "ratio": rho,
            "ess": ess.expand_as(rho),
            "kl_behavior": kl,
        }
        return TokenLoss(-weight * t.advantages * t.logprobs + (1 - ess) * kl, metrics)
