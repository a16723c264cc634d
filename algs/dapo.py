"""Decoupled clip and dynamic sampling policy optimization."""

from __future__ import annotations

from torch import Tensor

from algs import advantages
from algs.method import MethodParams, PolicyMethod, param
from algs.parts.ratio import ratio
from algs.parts.surrogate import clipped
from algs.records import Groups, PolicyTokens, TokenLoss


class DAPO(PolicyMethod):
    """Decoupled clip and dynamic sampling policy optimization (Yu et al. 2025, arXiv 2503.14476).

        r = pi / pi_old
        A = (R - mean_g) / (std_g + 1e-6)
        loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)     with dual_clip c, when A < 0: min(that, c |A|)
        clip_high > clip_low

    GRPO with four changes for long reasoning: a higher upper clip bound, so that rare tokens can grow; averaging over
    all tokens; dynamic sampling; a soft punishment of overlong responses. The last two are not in the loss: see
    `rollout.filters` and `reward.parts` in configs/dapo.yaml.
    Differs from the paper by: a dual clip (see GRPO; the authors' recipe in verl has it); the mean over all tokens of
    the update, as in the released recipe (the paper's formula divides by the tokens of each prompt:
    `objective.aggregation: prompt_mean`); a group whose rewards are equal gets exactly 0; dynamic sampling stops after
    `rollout.max_refill_rounds`.
    Relatives: GRPO (equal bounds, averages within each response first), DrGRPO (no division by std_g), CISPO (caps the
    weight, drops no token), LitePPO (one spread for the whole step), ScaleRL (drops zero-variance groups, no refill).
    """

    class Params(MethodParams):
        clip_low: float = param(
            0.2, "Ratios below 1 - clip_low give no gradient when the advantage is negative.", ge=0, lt=1
        )
        clip_high: float = param(
            0.28, "Ratios above 1 + clip_high give no gradient when the advantage is positive.", ge=0
        )
        dual_clip: float | None = param(3.0, "Ratios above this give no gradient when A < 0; empty is off.", gt=1)

    aggregation = "token_mean"
    params: Params

    def advantages(self, groups: Groups) -> Tensor:
        return advantages.group_zscore(groups)

    def loss(self, t: PolicyTokens) -> TokenLoss:
        p = self.params
        r = ratio(t.logprobs - t.old_logprobs)
        surrogate, metrics = clipped(r, t.advantages, p.clip_low, p.clip_high, p.dual_clip)
        return TokenLoss(-surrogate, metrics)
