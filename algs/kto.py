"""Kahneman-Tversky optimization."""

from __future__ import annotations

import torch
from torch import Tensor

from algs.method import MethodParams, PolicyMethod, param
from algs.parts.preference import log_ratio
from algs.records import PolicyTokens, TokenLoss


class KTO(PolicyMethod):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv 2402.01306, equations 7 and 8).

        reward(y) = beta log[pi(y|x) / pi_ref(y|x)], the log-probabilities summed over the response
        z0 = sg[max(0, mean of reward over all responses of the update)]
        loss = desirable_weight (1 - sigma(reward - z0)) for a desirable response
        loss = undesirable_weight (1 - sigma(z0 - reward)) for an undesirable one

    KTO learns from single responses with a thumb up or down; no pairs are needed. Like a person's, the gain is measured
    from a reference point and flattens far from it, so that responses already far on their side, and hopeless ones,
    hardly count. With unequal numbers of the two kinds choose the weights so that desirable_weight times the number of
    desirable responses is 1 to 4/3 times the same product of the undesirable.
    Differs from the paper by: the reference point. The paper estimates beta KL(pi || pi_ref) as the mean over responses
    paired with another row's prompt, which costs a second set of forward passes; here the mean is over the update's own
    responses, exact over micro-batches and ranks. It is a baseline rather than an estimate of that KL, and rises sooner
    when most responses are desirable.
    Relatives: DPO (pairs, no reference point), SFT (desirable responses alone, no reference model).
    """

    class Params(MethodParams):
        beta: float = param(0.1, "Strength of the KL penalty to the reference: with less, pi moves further.", gt=0)
        desirable_weight: float = param(1.0, "Weight of desirable responses, lambda_D in the paper.", ge=0)
        undesirable_weight: float = param(1.0, "Weight of undesirable responses, lambda_U in the paper.", ge=0)

    aggregation = "sequence_mean"
    data = "labels"
    params: Params

    def needs(self) -> frozenset[str]:
        return frozenset({"ref_logprobs"})

    def update_sums(self, t: PolicyTokens) -> dict[str, Tensor]:
        assert t.ref_logprobs is not None
        ones = torch.ones_like(t.logprobs)
        return {"log_ratio": t.logprobs - t.ref_logprobs, "responses": 1 / t.sequence_sum(ones)[t.sequence]}

    def loss(self, t: PolicyTokens) -> TokenLoss:
        assert t.chosen is not None, "these are no labelled data"
        p, s = self.params, t.update_sums
        reward = p.beta * log_ratio(t)
        z0 = (p.beta * s["log_ratio"] / s["responses"]).detach().clamp(min=0)
        gain = torch.where(t.chosen, reward - z0, z0 - reward)
        weight = torch.where(t.chosen, p.desirable_weight, p.undesirable_weight)
        logprob = t.sequence_mean(t.logprobs.detach())
        metrics = {  # each becomes a mean over its entries
            "accuracy": (gain > 0).float(),
            "margin": gain,
            "chosen_reward": reward[t.chosen],
            "rejected_reward": reward[~t.chosen],
            "chosen_logprob": logprob[t.chosen],
            "rejected_logprob": logprob[~t.chosen],
            "reference_point": z0.expand_as(reward),
        }
        return TokenLoss((weight * torch.sigmoid(-gain))[t.sequence], metrics)
