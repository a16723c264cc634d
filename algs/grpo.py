"""Group relative policy optimization."""

from __future__ import annotations

from torch import Tensor

from algs import advantages
from algs.method import MethodParams, PolicyMethod, param
from algs.parts.ratio import ratio
from algs.parts.surrogate import clipped
from algs.records import Groups, PolicyTokens, TokenLoss


class GRPO(PolicyMethod):
    """Group relative policy optimization (Shao et al. 2024, arXiv 2402.03300, equation 3).

        r = pi / pi_old
        A = (R - mean_g) / (std_g + 1e-6)
        loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)     with dual_clip c, when A < 0: min(that, c |A|)

    PPO's clipped ratio with the group in place of a critic: a response is good when it beats the other responses to its
    prompt. The usual first choice when rewards can be checked. Clipping acts only after the first optimizer step on a
    batch; before it r = 1.
    Differs from the paper by: a dual clip (arXiv 1912.09729; verl has it too), since one token of large r and A < 0
    could outweigh all others; separate clip bounds (equal by default, as in the paper); the KL to the reference is
    `objective.kl` (the paper: coef 0.04, k3, in the loss) and off by default, so that no reference model is held; a
    group whose rewards are equal gets exactly 0.
    Relatives: PPO (a critic in place of the group), DrGRPO (no division by std_g or length), DAPO (clips higher,
    averages over tokens), GSPO (one ratio per response), CISPO (caps the weight, drops no token), SAPO (a gate in
    place of the clip).
    """

    class Params(MethodParams):
        clip_low: float = param(
            0.2, "Ratios below 1 - clip_low give no gradient when the advantage is negative.", ge=0, lt=1
        )
        clip_high: float = param(
            0.2, "Ratios above 1 + clip_high give no gradient when the advantage is positive.", ge=0
        )
        dual_clip: float | None = param(3.0, "Ratios above this give no gradient when A < 0; empty is off.", gt=1)

    aggregation = "sequence_mean"
    params: Params

    def advantages(self, groups: Groups) -> Tensor:
        return advantages.group_zscore(groups)

    def loss(self, t: PolicyTokens) -> TokenLoss:
        p = self.params
        r = ratio(t.logprobs - t.old_logprobs)
        surrogate, metrics = clipped(r, t.advantages, p.clip_low, p.clip_high, p.dual_clip)
        return TokenLoss(-surrogate, metrics)
