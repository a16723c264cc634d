"""GRPO done right: no division by the group's spread, none by the response's length."""

from __future__ import annotations

from torch import Tensor

from algs import advantages
from algs.method import MethodParams, PolicyMethod, param
from algs.parts.ratio import ratio
from algs.parts.surrogate import clipped
from algs.records import Groups, PolicyTokens, TokenLoss


class DrGRPO(PolicyMethod):
    """GRPO done right (Liu et al. 2025, arXiv 2503.20783).

        r = pi / pi_old
        A = R - mean_g
        loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)     with dual_clip c, when A < 0: min(that, c |A|)

    Two of GRPO's divisions bias it: by std_g, which favours prompts that are nearly always or nearly never solved, and
    by a response's own length, which makes long wrong answers cheap. This one leaves both out. Use it when response
    lengths grow without the reward growing.
    Differs from the paper by: a dual clip (see GRPO); separate clip bounds (equal by default, as in the paper).
    Relatives: GRPO (divides by std_g, `sequence_mean`), RLOO (advantage G / (G - 1) larger, no clip), DAPO (keeps
    std_g, averages over all tokens), REINFORCE (this without clip).
    """

    class Params(MethodParams):
        clip_low: float = param(
            0.2, "Ratios below 1 - clip_low give no gradient when the advantage is negative.", ge=0, lt=1
        )
        clip_high: float = param(
            0.2, "Ratios above 1 + clip_high give no gradient when the advantage is positive.", ge=0
        )
        dual_clip: float | None = param(3.0, "Ratios above this give no gradient when A < 0; empty is off.", gt=1)

    aggregation = "fixed_length"
    params: Params

    def advantages(self, groups: Groups) -> Tensor:
        return advantages.group_mean(groups)

    def loss(self, t: PolicyTokens) -> TokenLoss:
        p = self.params
        r = ratio(t.logprobs - t.old_logprobs)
        surrogate, metrics = clipped(r, t.advantages, p.clip_low, p.clip_high, p.dual_clip)
        return TokenLoss(-surrogate, metrics)
