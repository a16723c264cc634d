"""Direct preference optimization."""

from __future__ import annotations

from torch.nn.functional import logsigmoid

from algs.method import MethodParams, PolicyMethod, param
from algs.parts.preference import log_ratio, logprobs_reported, rewards_reported
from algs.records import PolicyTokens, TokenLoss


class DPO(PolicyMethod):
    """Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290, equation 7).

        reward(y) = beta log[pi(y|x) / pi_ref(y|x)], the log-probabilities summed over the response
        m = reward(chosen) - reward(rejected)
        loss = -(1 - label_smoothing) log sigma(m) - label_smoothing log sigma(-m), one per pair

    DPO learns from pairs of responses of which one is preferred, without a reward model and without sampling: the
    policy's log-ratio to the reference is the reward, and the loss is that reward's likelihood of the preferences.
    Pairs that are already right by a wide margin stop counting. It is the usual first choice for preference data.
    Differs from the paper by: nothing at the default label_smoothing 0 and length_normalized false. Label smoothing is
    conservative DPO (Mitchell 2023): it says that this share of the labels is wrong. length_normalized takes the mean
    over each response in place of the sum (beta must then be larger, about 1 to 10).
    Relatives: IPO (a squared distance to a set margin), SimPO (no reference, length-normalised), ORPO (no reference,
    one stage with maximum likelihood), KTO (needs no pairs), RewardModel (the same likelihood on an explicit reward).
    """

    class Params(MethodParams):
        beta: float = param(0.1, "Strength of the KL penalty to the reference: with less, pi moves further.", gt=0)
        label_smoothing: float = param(0.0, "Share of pairs believed to be labelled the wrong way round.", ge=0, lt=0.5)
        length_normalized: bool = param(
            False, "Mean over each response's tokens in place of the sum, so that long responses do not weigh more."
        )

    aggregation = "prompt_mean"
    data = "pairs"
    params: Params

    def needs(self) -> frozenset[str]:
        return frozenset({"ref_logprobs"})

    def loss(self, t: PolicyTokens) -> TokenLoss:
        p = self.params
        chosen, rejected = t.pairs(p.beta * log_ratio(t, per_token=p.length_normalized))
        margin = chosen - rejected
        loss = -(1 - p.label_smoothing) * logsigmoid(margin) - p.label_smoothing * logsigmoid(-margin)
        return TokenLoss(t.on_pair_tokens(loss), rewards_reported(chosen, rejected) | logprobs_reported(t))
