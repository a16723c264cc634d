"""PPO's clipped surrogate, shared by every method that clips a ratio."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), to be maximised, and its metrics, all [N] float32.

    This is equation 7 of Schulman et al. 2017, arXiv 1707.06347. It has no bound where A < 0 and r is large; with
    `dual_clip` (Ye et al. 2020, arXiv 1912.09729) it is at least dual_clip A there. The metrics are ratio, and
    clip_fraction and dual_clip_fraction, which are 1 where a clip binds and the token has no gradient.
    """
    unbounded = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    surrogate = torch.minimum(unbounded, bounded)
    metrics = {"clip_fraction": (bounded < unbounded).float(), "ratio": ratio}
    if dual_clip is not None:
        floor = torch.where(advantages < 0, dual_clip * advantages, -torch.inf)
        metrics["dual_clip_fraction"] = (surrogate < floor).float()
        surrogate = torch.maximum(surrogate, floor)
    return surrogate, metrics
