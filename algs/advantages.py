"""Advantages on whole, possibly ragged, groups: [S] rewards in, [S] advantages out."""

from __future__ import annotations

import torch
from torch import Tensor

from algs.records import Groups


def group_mean(groups: Groups) -> Tensor:
    """R - mean_g (Dr. GRPO, arXiv 2503.20783). [S]"""
    return groups.rewards - (groups.sum_by_group(groups.rewards) / groups.sizes)[groups.group]


def group_zscore(groups: Groups, tolerance: float = 1e-6) -> Tensor:
    """(R - mean_g) / (std_g + 1e-6), std with n - 1 (GRPO, arXiv 2402.03300). [S]

    A group whose rewards differ by no more than `tolerance` carries no signal and gets exactly 0 (rounding noise over
    1e-6 would otherwise become an advantage of order 1); so does a group of one.
    """
    centred = group_mean(groups)
    variance = groups.sum_by_group(centred.square()) / (groups.sizes - 1).clamp(min=1)
    zscore = centred / (variance.sqrt() + 1e-6)[groups.group]
    return torch.where(varies(groups, tolerance)[groups.group], zscore, torch.zeros_like(zscore))


def varies(groups: Groups, tolerance: float = 1e-6) -> Tensor:
    """Whether a group's rewards differ at all. [P] bool"""
    shape = groups.sizes
    high = torch.full_like(shape, -torch.inf).scatter_reduce_(0, groups.group, groups.rewards, "amax")
    low = torch.full_like(shape, torch.inf).scatter_reduce_(0, groups.group, groups.rewards, "amin")
    return high - low > tolerance
