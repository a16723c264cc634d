"""Per-token estimators of KL(pi || pi_ref) on sampled tokens (Schulman 2020, "Approximating KL divergence").

Which belongs where, for tokens sampled from mu; d = log(pi/ref):

    in the reward         k1. Its policy gradient is that of the KL of whole responses. Those of k2 and k3 are not, and
                          k3's is nearly orthogonal to it (arXiv 2512.21852).
    in the loss, mu = pi  k2 has the gradient of KL(pi || ref), k3 that of KL(ref || pi) reweighted onto pi's samples.
                          k1 has none: its expectation is 0.
    in the loss, mu != pi `weighted` alone has a KL's gradient. The ratio is pi / mu, of the policy that sampled;
                          pi / pi_old is the same only where pi_old is mu (arXiv 2512.02556).

In the loss each is the gradient of the KL at the states that were visited. What a token does to the KL of later tokens
is left out, and so is how pi would visit other states than mu (arXiv 2506.09477); k1 in the reward has the former.
"""

from __future__ import annotations

from torch import Tensor

from algs.parts.ratio import ratio, ratio_minus_one

ESTIMATORS = ("k1", "k2", "k3")
K3_LINEAR = 5.0  # nats of log(ref/pi): a gradient of at most 147; verl has none where k3 is above 10, at 2.6 nats


def estimate(name: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return k1 = log(pi/ref), k2 = k1^2 / 2 or k3 = ref/pi - 1 - log(ref/pi). [N], [N] -> [N]

    Past d = -K3_LINEAR, k3 goes on along its tangent: with log(ref/pi) = 15 one token had 4,100 times the gradient of
    1000 others. Clamping inside k3 would flip the gradient's sign.

    Raises:
        ValueError: `name` is not one of ESTIMATORS.
    """
    log_ratio = logprobs - ref_logprobs
    if name == "k1":
        return log_ratio
    if name == "k2":
        return 0.5 * log_ratio.square()
    if name == "k3":
        return ratio_minus_one(-log_ratio, K3_LINEAR) + log_ratio
    raise ValueError(f"KL estimator '{name}' is not one of {', '.join(ESTIMATORS)}")


def weighted(name: str, logprobs: Tensor, behavior_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return sg(pi/mu) k2 or (pi/mu) k3, whose gradients are that of KL(pi || ref) on tokens of mu. [N] each -> [N]

    The gradient of (pi/mu) k3, through both factors, is (pi/mu) d grad log pi: that of sg(pi/mu) k2. It is taken from
    k2, since k3's own terms of size ref/pi would cancel in float32.
    """
    rho = ratio(logprobs - behavior_logprobs).detach()
    square = estimate("k2", logprobs, ref_logprobs)
    return rho * (square + (estimate(name, logprobs, ref_logprobs) - square).detach())
