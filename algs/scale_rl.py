"""The loss of the ScaleRL recipe."""

from __future__ import annotations

from torch import Tensor

from algs import advantages
from algs.method import MethodParams, PolicyMethod, param
from algs.parts.ratio import ratio
from algs.records import Groups, PolicyTokens, TokenLoss


class ScaleRL(PolicyMethod):
    """ScaleRL recipe (Khatri et al. 2025, arXiv 2510.13786).

        r = pi / pi_old, in overlap pi / mu
        A = (R - mean_g) / std of all R - mean_g of the step
        loss = -sg[min(r, ratio_cap)] A log pi

    CISPO's loss, one spread for the whole step, every prompt of equal weight (`prompt_mean`): what scaled best in the
    paper's comparison. The rest of the recipe is not in the loss: float32 language-model head, zero-variance groups
    out, easy prompts retired; configs/scale_rl.yaml sets them.
    Differs from the paper by: the paper's r is to the generator (mu) always, here where tokens may be old
    (`objective.old_logprobs: engine`, set by the schedule; the paper: up to 8 steps); no forced end of long thoughts; a
    step in which no group's rewards differ gets exactly 0.
    Relatives: CISPO (divides by std_g, `token_mean`), LitePPO (spread of raw R, clips r), DAPO (clips r, refills), AIPO
    (r = pi / mu).
    """

    class Params(MethodParams):
        ratio_cap: float = param(5.0, "Largest weight of a token: the cap itself, on r; not 1 + a distance.", gt=0)

    aggregation = "prompt_mean"
    params: Params

    def advantages(self, groups: Groups) -> Tensor:
        return advantages.scale_rl(groups)

    def loss(self, t: PolicyTokens) -> TokenLoss:
        p = self.params
        r = ratio(t.logprobs - t.old_logprobs).detach()
        weight = r.clamp(max=p.ratio_cap)
        metrics = {"clip_fraction": (weight != r).float(), "ratio": r}
        return TokenLoss(-weight * t.advantages * t.logprobs, metrics)
