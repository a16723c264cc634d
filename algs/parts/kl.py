"""Per-token estimators of KL(pi || pi_ref) on tokens sampled from pi (Schulman 2020, "Approximating KL divergence")."""

from __future__ import annotations

import torch
from torch import Tensor

ESTIMATORS = ("k1", "k2", "k3")


def estimate(name: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return k1 = log(pi/ref), k2 = k1^2 / 2 or k3 = ref/pi - 1 - log(ref/pi). [N], [N] -> [N]

    As a loss, k1 has no useful gradient (its expectation is zero), k2 has the gradient of KL(pi || ref), and k3 that of
    KL(ref || pi) reweighted onto pi's samples. Nothing is clamped, because clamping inside k3 flips the gradient's
    sign.

    Raises:
        ValueError: `name` is not one of ESTIMATORS.
    """
    log_ratio = logprobs - ref_logprobs
    if name == "k1":
        return log_ratio
    if name == "k2":
        return 0.5 * log_ratio.square()
    if name == "k3":
        return torch.expm1(-log_ratio) + log_ratio
    raise ValueError(f"KL estimator '{name}' is not one of {', '.join(ESTIMATORS)}")
