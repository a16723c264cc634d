"""Supervised fine-tuning: maximum likelihood on the trained tokens."""

from __future__ import annotations

from algs.method import MethodParams, PolicyMethod
from algs.records import PolicyTokens, TokenLoss


class SFT(PolicyMethod):
    """Supervised fine-tuning by maximum likelihood.

        loss = -log pi

    The policy learns to repeat the given responses. `token_mean` is the usual cross-entropy, exact over the update:
    every trained token of all micro-batches and ranks counts the same.
    Differs from the paper by: nothing; there is no paper.
    Relatives: REINFORCE (weighs each response with its advantage), ORPO (adds a penalty on rejected responses), DPO
    (learns from pairs, usually after this).
    """

    class Params(MethodParams):
        pass

    aggregation = "token_mean"
    data = "demonstrations"

    def loss(self, t: PolicyTokens) -> TokenLoss:
        return TokenLoss(-t.logprobs)
