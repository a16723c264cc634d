"""Soft adaptive policy optimization: a gate in place of the clip."""

from __future__ import annotations

import torch
from torch import Tensor

from algs import advantages
from algs.method import MethodParams, PolicyMethod, param
from algs.parts.ratio import ratio
from algs.records import Groups, PolicyTokens, TokenLoss


class SAPO(PolicyMethod):
    """SAPO, soft adaptive policy optimization (Gao et al. 2025, arXiv 2511.20347).

        r = pi / pi_old
        A = (R - mean_g) / (std_g + 1e-6)
        tau = tau_positive when A > 0, else tau_negative
        loss = -4 / tau sigmoid(tau (r - 1)) A

    The gradient fades smoothly as r leaves 1, in both directions, where a clip cuts it off at once: its weight is 4 s
    (1 - s) r with s = sigmoid(tau (r - 1)), which is 1 at r = 1. Tokens with negative advantage fade sooner, since
    pushing one token down lifts all others. Use it when the clip fraction is high or the run unstable.
    Differs from the paper by: a group whose rewards are equal gets exactly 0. Another method is called SAPO too: a
    decentralised one (arXiv 2509.08721), which is not this.
    Relatives: GRPO (hard clip), GSPO (hard clip of whole responses), CISPO (caps the weight, never fades it).
    """

    class Params(MethodParams):
        tau_positive: float = param(
            1.0, "How fast the gradient fades with |r - 1| when the advantage is positive.", gt=0
        )
        tau_negative: float = param(1.05, "The same when the advantage is negative.", gt=0)

    aggregation = "sequence_mean"
    params: Params

    def advantages(self, groups: Groups) -> Tensor:
        return advantages.group_zscore(groups)

    def loss(self, t: PolicyTokens) -> TokenLoss:
        p = self.params
        r = ratio(t.logprobs - t.old_logprobs)
        tau = torch.full_like(r, p.tau_negative).masked_fill(t.advantages > 0, p.tau_positive)
        opened = torch.sigmoid(tau * (r - 1))
        metrics = {"gate": 4 * opened * (1 - opened), "ratio": r}  # gate: the gradient kept, 1 at r = 1
        return TokenLoss(-4 / tau * opened * t.advantages, metrics)
