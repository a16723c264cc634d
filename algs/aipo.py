"""Asynchronous importance-weighted policy optimization."""

from __future__ import annotations

from torch import Tensor

from algs import advantages
from algs.method import MethodParams, PolicyMethod, param
from algs.parts.ratio import ratio
from algs.records import Groups, PolicyTokens, TokenLoss


class AIPO(PolicyMethod):
    """Asynchronous importance-weighted policy optimization (Wu et al. 2025, arXiv 2505.24034).

        rho = pi / mu
        A = R - mean_g
        loss = -sg[min(rho, ratio_cap)] A log pi

    LlamaRL's loss for generation that runs beside training: one weight, straight against the policy that sampled,
    corrects both staleness and the engine's rounding. Past the cap a token keeps the weight ratio_cap. It reads no
    pi_old; an off-policy correction beside it would count mu twice.
    Differs from the paper by: the group's mean, which includes the response itself, as baseline; the KL to the
    reference is `objective.kl`.
    Relatives: CISPO (pi_old in place of mu, larger cap), P3O (the data sets the cap), DecoupledPPO (splits rho in two),
    REINFORCE (this at rho = 1).
    """

    class Params(MethodParams):
        ratio_cap: float = param(2.0, "Largest weight of a token, on pi / mu: the cap itself.", gt=0)

    aggregation = "token_mean"
    params: Params

    def advantages(self, groups: Groups) -> Tensor:
        return advantages.group_mean(groups)

    def loss(self, t: PolicyTokens) -> TokenLoss:
        p = self.params
        r = ratio(t.logprobs - t.behavior_logprobs).detach()
        weight = r.clamp(max=p.ratio_cap)
        metrics = {"clip_fraction": (weight != r).float(), "ratio": r}
        return TokenLoss(-weight * t.advantages * t.logprobs, metrics)
