"""Supervised fine-tuning: maximum likelihood on the trained tokens."""

from __future__ import annotations

from algs.method import MethodParams, PolicyMethod
from algs.records import PolicyTokens, TokenLoss


class SFT(PolicyMethod):
    """loss = -log pi. Advantages play no part; `objective.aggregation: token_mean` gives the usual cross-entropy."""

    class Params(MethodParams):
        pass

    def loss(self, t: PolicyTokens) -> TokenLoss:
        return TokenLoss(-t.logprobs)
