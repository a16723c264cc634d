"""Simple preference optimization."""

from __future__ import annotations

from torch.nn.functional import logsigmoid

from algs.method import MethodParams, PolicyMethod, param
from algs.parts.preference import logprobs_reported, rewards_reported
from algs.records import PolicyTokens, TokenLoss


class SimPO(PolicyMethod):
    """Simple preference optimization (Meng et al. 2024, arXiv 2405.14734, equation 6).

        reward(y) = beta (1 / |y|) log pi(y|x), the mean log-probability of the response's tokens
        loss = -log sigma(reward(chosen) - reward(rejected) - gamma), one per pair

    The reward is what the model ranks by when it generates, and needs no reference model: less memory, one forward pass
    less. The chosen response must win by gamma. Nothing holds the policy to where it began but the learning rate and
    the length of training: keep both small.
    Differs from the paper by: nothing. gamma is the paper's, on the scale of the reward; configurations elsewhere may
    name gamma / beta.
    Relatives: DPO (a reference, sums over the response), IPO (a target margin too, with a reference), ORPO (no
    reference either, holds on by maximum likelihood).
    """

    class Params(MethodParams):
        beta: float = param(2.0, "Scale of the reward. The paper: 2.0 to 2.5.", gt=0)
        gamma: float = param(
            1.0, "Margin by which the chosen reward must exceed the rejected. The paper: 0.3 to 1.6.", ge=0
        )

    aggregation = "prompt_mean"
    data = "pairs"
    params: Params

    def loss(self, t: PolicyTokens) -> TokenLoss:
        p = self.params
        chosen, rejected = t.pairs(p.beta * t.sequence_mean(t.logprobs))
        loss = -logsigmoid(chosen - rejected - p.gamma)
        return TokenLoss(t.on_pair_tokens(loss), rewards_reported(chosen, rejected) | logprobs_reported(t))
