"""Identity preference optimization."""

from __future__ import annotations

from algs.method import MethodParams, PolicyMethod, param
from algs.parts.preference import log_ratio, logprobs_reported, rewards_reported
from algs.records import PolicyTokens, TokenLoss


class IPO(PolicyMethod):
    """Identity preference optimization (Azar et al. 2023, arXiv 2310.12036, equation 17).

        h = log[pi(y|x) / pi_ref(y|x)] of the chosen minus that of the rejected response, each a mean over its tokens
        loss = (h - 1 / (2 tau))^2, one per pair

    DPO's likelihood is never satisfied: on pairs with certain labels it drives the margin to infinity, whatever beta.
    Here the margin has a target, 1 / (2 tau), and a pair beyond it is pulled back. Reported rewards are tau times the
    log-ratio, so that the target of their margin is 1/2.
    Differs from the paper by: log-ratios are means over the response and not sums, so that one target fits all lengths;
    trl says that the paper's authors confirmed this as what their results used. length_normalized false gives the sums
    that the equation reads as.
    Relatives: DPO (a likelihood in place of the square), SimPO (a target margin too, no reference).
    """

    class Params(MethodParams):
        tau: float = param(
            0.1, "Strength of the KL penalty to the reference; the margin's target is 1 / (2 tau).", gt=0
        )
        length_normalized: bool = param(
            True, "Mean over each response's tokens. false: their sum, as the paper's equation has it."
        )

    aggregation = "prompt_mean"
    data = "pairs"
    params: Params

    def needs(self) -> frozenset[str]:
        return frozenset({"ref_logprobs"})

    def loss(self, t: PolicyTokens) -> TokenLoss:
        tau = self.params.tau
        chosen, rejected = t.pairs(log_ratio(t, per_token=self.params.length_normalized))
        loss = (chosen - rejected - 1 / (2 * tau)).square()
        metrics = rewards_reported(tau * chosen, tau * rejected) | logprobs_reported(t)
        return TokenLoss(t.on_pair_tokens(loss), metrics)
