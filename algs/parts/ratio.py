"""The exponential of a log-ratio that cannot overflow: past a bound it goes on along its tangent.

Where exp(log r) is Inf, a clipped token's gradient is 0 * Inf = NaN and the whole update is lost. On the tangent a
ratio stays finite, and so does a gradient that goes through it, which keeps its sign: cut off, it would be 0 or turn.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LARGEST = 30.0  # nats: a million squares of such a gradient still have a sum in float32, the norm that all ranks take


def ratio(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), and e^30 (log_ratio - 29) where log_ratio is above 30. [N] -> [N]"""
    return torch.exp(log_ratio.clamp(max=LARGEST)) + _tangent(log_ratio, LARGEST)


def ratio_minus_one(log_ratio: Tensor, largest: float = LARGEST) -> Tensor:
    """Return exp(log_ratio) - 1, precise next to 0, and its tangent where log_ratio is above `largest`. [N] -> [N]"""
    return torch.expm1(log_ratio.clamp(max=largest)) + _tangent(log_ratio, largest)


def _tangent(log_ratio: Tensor, largest: float) -> Tensor:
    return math.exp(largest) * torch.relu(log_ratio - largest)
