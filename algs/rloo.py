"""REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

from torch import Tensor

from algs import advantages
from algs.method import MethodParams, PolicyMethod
from algs.records import Groups, PolicyTokens, TokenLoss


class RLOO(PolicyMethod):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740).

        A = R - mean of the group's other R = G / (G - 1) (R - mean_g)
        loss = -A log pi

    The baseline of a response is made of the group's other responses, so the gradient is unbiased for any group size.
    Use it on fresh data, one optimizer step per batch, when GRPO's division by the group's spread is not wanted.
    Differs from the paper by: `fixed_length` averaging divides the sum over a response by a constant (`sequence_sum`
    does not); the KL to the reference, in the paper's reward, is `objective.kl` with `placement: reward`, where a token
    has the penalties from itself on (the paper: of the whole response; same expectation, less noise); a group of one
    gets advantage 0.
    Relatives: REINFORCE (baseline of the whole group: G / (G - 1) smaller), DrGRPO (clips r), GRPO (divides by std_g).
    """

    class Params(MethodParams):
        pass

    aggregation = "fixed_length"
    params: Params

    def advantages(self, groups: Groups) -> Tensor:
        return advantages.rloo(groups)

    def loss(self, t: PolicyTokens) -> TokenLoss:
        return TokenLoss(-t.advantages * t.logprobs)
