"""Supervised fine-tuning: maximum likelihood on the trained tokens."""

from __future__ import annotations

from algs.method import MethodParams, PolicyMethod
from algs.records import PolicyTokens, TokenLoss


class SFT(PolicyMethod):
    """Supervised fine-tuning by maximum likelihood.

        loss = -log pi

    Learns to repeat the given responses. Advantages play no part; `token_mean` gives the usual cross-entropy.
    Differs from the paper by: nothing; there is no paper.
    Relatives: REINFORCE (weighs each response with its advantage).
    """

    class Params(MethodParams):
        pass

    aggregation = "token_mean"
    data = "demonstrations"

    def loss(self, t: PolicyTokens) -> TokenLoss:
        return TokenLoss(-t.logprobs)
