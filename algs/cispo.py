"""Clipped importance sampling policy optimization."""

from __future__ import annotations

from torch import Tensor

from algs import advantages
from algs.method import MethodParams, PolicyMethod, param
from algs.parts.ratio import ratio
from algs.records import Groups, PolicyTokens, TokenLoss


class CISPO(PolicyMethod):
    """Clipped importance sampling policy optimization (MiniMax 2025, arXiv 2506.13585).

        r = pi / pi_old, in overlap pi / mu
        A = (R - mean_g) / (std_g + 1e-6)
        loss = -sg[min(r, ratio_cap)] A log pi

    REINFORCE with an importance weight that is capped. Past the cap a token keeps its gradient, where PPO's clip drops
    it: rare tokens at the turns of a reasoning are the ones that PPO drops first. Use it with several optimizer steps
    per batch or with stale data.
    Differs from the paper by: ratio_cap is the largest weight itself (the paper's 1 + eps_high; other code may call
    either the cap); the mean over all tokens of the update, as in DAPO's released recipe (the paper's formula divides
    by the tokens of each prompt: `objective.aggregation: prompt_mean`); a group whose rewards are equal gets exactly 0.
    Relatives: ScaleRL (this loss, other advantage and averaging), AIPO (r = pi / mu, smaller cap), REINFORCE (this at r
    = 1, without std_g), GRPO (drops tokens past the clip), P3O (the data sets the cap).
    """

    class Params(MethodParams):
        ratio_cap: float = param(5.0, "Largest weight of a token: the cap itself, on r; not 1 + a distance.", gt=0)
        ratio_floor: float = param(0.0, "Smallest weight of a token; 0 is off, as in the paper.", ge=0)

        def __post_init__(self) -> None:
            if self.ratio_floor > self.ratio_cap:
                raise ValueError(f"ratio_floor {self.ratio_floor} is above ratio_cap {self.ratio_cap}; lower it")

    aggregation = "token_mean"
    params: Params

    def advantages(self, groups: Groups) -> Tensor:
        return advantages.group_zscore(groups)

    def loss(self, t: PolicyTokens) -> TokenLoss:
        p = self.params
        r = ratio(t.logprobs - t.old_logprobs).detach()
        weight = r.clamp(p.ratio_floor, p.ratio_cap)
        metrics = {"clip_fraction": (weight != r).float(), "ratio": r}
        return TokenLoss(-weight * t.advantages * t.logprobs, metrics)
