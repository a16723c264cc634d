"""Odds ratio preference optimization."""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from algs.method import MethodParams, PolicyMethod, param
from algs.parts.preference import logprobs_reported, rewards_reported
from algs.records import PolicyTokens, TokenLoss

CERTAIN = -1e-7  # log P nearest to 0 at which the odds are taken: at 0, float32's rounding of 1, they would be infinite


class ORPO(PolicyMethod):
    """Odds ratio preference optimization (Hong et al. 2024, arXiv 2403.07691, equations 4 to 7).

        log P(y) = (1 / |y|) log pi(y|x)          log odds(y) = log P - log(1 - P)
        loss = -log P(chosen) - odds_weight log sigma(log odds(chosen) - log odds(rejected)), one per pair

    Supervised fine-tuning on the chosen responses with a penalty on the rejected ones: one stage where others need
    fine-tuning first and preferences after, and no reference model. The odds punish a rejected response the harder the
    more probable it is. The reported rewards are the log odds.
    Differs from the paper by: nothing in the formula. The likelihood is that of the response alone, a mean over its
    tokens and then over pairs (trl's takes the prompt in, and one mean over all tokens).
    Relatives: SFT (the first term alone), SimPO (log-probabilities in place of odds, no likelihood term), DPO (a
    reference model).
    """

    class Params(MethodParams):
        odds_weight: float = param(
            0.1, "Weight of the odds ratio term, lambda in the paper; 0 is maximum likelihood.", ge=0
        )

    aggregation = "prompt_mean"
    data = "pairs"
    params: Params

    def loss(self, t: PolicyTokens) -> TokenLoss:
        log_p = t.sequence_mean(t.logprobs)
        log_odds = log_p - torch.log(-torch.expm1(log_p.clamp(max=CERTAIN)))
        likelihood, _ = t.pairs(log_p)
        chosen, rejected = t.pairs(log_odds)
        odds_loss = -logsigmoid(chosen - rejected)
        metrics = rewards_reported(chosen, rejected) | {"nll": -likelihood, "odds_loss": odds_loss}
        loss = -likelihood + self.params.odds_weight * odds_loss
        return TokenLoss(t.on_pair_tokens(loss), metrics | logprobs_reported(t))
