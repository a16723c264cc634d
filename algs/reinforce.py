"""REINFORCE with the group's mean as baseline."""

from __future__ import annotations

from torch import Tensor

from algs import advantages
from algs.method import MethodParams, PolicyMethod
from algs.records import Groups, PolicyTokens, TokenLoss


class REINFORCE(PolicyMethod):
    """REINFORCE (Williams 1992; for language models Ahmadian et al. 2024, arXiv 2402.14740).

        A = R - mean_g
        loss = -A log pi

    The plain policy gradient: no ratio, no clip, nothing to tune. Use it on fresh data, one optimizer step per batch;
    every other method here has this gradient when pi = pi_old = mu, up to the scale of its advantage.
    Differs from the paper by: the group's mean, which includes the response itself, as baseline; `fixed_length`
    averaging divides the sum over a response by a constant.
    Relatives: RLOO (leave-one-out baseline), CISPO (the same with a weight min(r, cap) for stale data), DrGRPO (clips
    r), P3O (this at ESS = 1).
    """

    class Params(MethodParams):
        pass

    aggregation = "fixed_length"
    params: Params

    def advantages(self, groups: Groups) -> Tensor:
        return advantages.group_mean(groups)

    def loss(self, t: PolicyTokens) -> TokenLoss:
        return TokenLoss(-t.advantages * t.logprobs)
