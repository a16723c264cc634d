"""PPO's clipped surrogate, shared by every method that clips a ratio."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Return min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), to be maximised, and its metrics, all [N] float32.

    This is equation 7 of Schulman et al. 2017, arXiv 1707.06347. The metrics are ratio, and clip_fraction, which is 1
    where the clip binds and the token has no gradient.
    """
    unbounded = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return torch.minimum(unbounded, bounded), {"clip_fraction": (bounded < unbounded).float(), "ratio": ratio}
