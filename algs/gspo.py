"""Group sequence policy optimization."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from algs import advantages
from algs.method import MethodParams, PolicyMethod, param
from algs.parts.ratio import ratio
from algs.parts.surrogate import clipped
from algs.records import Groups, PolicyTokens, TokenLoss


class GSPO(PolicyMethod):
    """Group sequence policy optimization (Zheng et al. 2025, arXiv 2507.18071).

        s = exp(mean over the response of log(pi / pi_old))
        A = (R - mean_g) / (std_g + 1e-6)
        sequence: loss = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)
        token:    the same with sg[s] pi / sg[pi] in place of s

    The reward judges the whole response, so the ratio does too: a response is clipped whole or not at all. The clip
    bounds are much smaller than GRPO's, since a mean over tokens varies less. GSPO is made for mixture-of-experts
    models, whose single-token ratios are noisy. Both levels have the same gradient when all tokens of a response share
    one advantage.
    Differs from the paper by: a group whose rewards are equal gets exactly 0.
    Relatives: GRPO (one ratio per token), DAPO (one per token, averages over all tokens), SAPO (a gate per token).
    """

    class Params(MethodParams):
        clip_low: float = param(
            3e-4, "Responses whose s is below 1 - clip_low have no gradient when A < 0.", ge=0, lt=1
        )
        clip_high: float = param(4e-4, "Responses whose s is above 1 + clip_high have no gradient when A > 0.", ge=0)
        dual_clip: float | None = param(
            None, "Responses whose s is above this have no gradient when A < 0; empty is off.", gt=1
        )
        level: Literal["sequence", "token"] = param(
            "sequence", "token: the paper's GSPO-token, for advantages that differ within a response."
        )

    aggregation = "sequence_mean"
    params: Params

    def advantages(self, groups: Groups) -> Tensor:
        return advantages.group_zscore(groups)

    def loss(self, t: PolicyTokens) -> TokenLoss:
        p = self.params
        s = ratio(t.sequence_mean(t.logprobs - t.old_logprobs))[t.sequence]
        if p.level == "token":
            s = s.detach() * torch.exp(t.logprobs - t.logprobs.detach())
        surrogate, metrics = clipped(s, t.advantages, p.clip_low, p.clip_high, p.dual_clip)
        return TokenLoss(-surrogate, metrics)
