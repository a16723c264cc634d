"""A reward model from preferences."""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from algs.method import MethodParams, PolicyMethod, param
from algs.parts.preference import rewards_reported
from algs.records import PolicyTokens, TokenLoss


class RewardModel(PolicyMethod):
    """A reward model by the Bradley-Terry likelihood (1952; Ouyang et al. 2022, arXiv 2203.02155, equation 1).

        score(y) = the value head's output at the last token of the response
        loss = -log sigma(score(chosen) - score(rejected) - margin)
               + centering (score(chosen) + score(rejected))^2, one per pair

    The result is not a policy: it learns to score responses so that the chosen one scores higher, and is then a reward
    for reinforcement learning. Its one loss trains the value head and the model beneath it together. The likelihood
    does not fix where the scores lie; centering keeps them near 0, so that scores of different prompts and runs can be
    compared.
    Differs from the paper by: one pair per prompt counts as one (the paper takes all pairs of a ranking together). The
    margin is from Llama 2 (2307.09288, equation 2; one for all pairs here), centering from Eisenstein et al. 2023
    (2312.09244, where it is 0.01); both are off by default.
    Relatives: DPO (the same likelihood with the policy as its own reward), PPO (learns from such a reward).
    """

    class Params(MethodParams):
        margin: float = param(0.0, "By how much the chosen score must exceed the rejected.", ge=0)
        centering: float = param(0.0, "Weight of the squared sum of a pair's scores.", ge=0)

    aggregation = "prompt_mean"
    data = "pairs"
    params: Params

    def needs(self) -> frozenset[str]:
        return frozenset({"values"})

    def loss(self, t: PolicyTokens) -> TokenLoss:
        assert t.values is not None
        p = self.params
        is_last = torch.ones_like(t.sequence, dtype=torch.bool)
        is_last[:-1] = t.sequence[1:] != t.sequence[:-1]
        chosen, rejected = t.pairs(t.sequence_sum(torch.where(is_last, t.values, torch.zeros_like(t.values))))
        loss = -logsigmoid(chosen - rejected - p.margin) + p.centering * (chosen + rejected).square()
        return TokenLoss(t.on_pair_tokens(loss), rewards_reported(chosen, rejected))
