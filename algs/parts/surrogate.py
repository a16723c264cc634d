"""PPO's clipped surrogate, shared by every method that clips a ratio."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), to be maximised, and its metrics; all [N] float32.

    Source: Schulman et al. 2017, arXiv 1707.06347, equation 7. Metrics: clip_fraction, 1 where the clip binds, so that
    the token has no gradient; ratio.
    """
    unbounded = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return torch.minimum(unbounded, bounded), {"clip_fraction": (bounded < unbounded).float(), "ratio": ratio}
