"""Estimate pass@k without bias, and its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the unbiased estimate that at least one of k samples passes, when `correct` of `samples` passed.

    It is 1 - C(n-c, k) / C(n, k), where n is `samples` and c is `correct` (Chen et al. 2021, arXiv 2107.03374, equation
    1).

    Raises:
        ValueError: k is larger than the number of samples, for which no unbiased estimate exists.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples per prompt, there are {samples}; sample more")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def ks_up_to(samples: int) -> list[int]:
    """Return 1, 2, 4, ... up to `samples`, and `samples` itself."""
    powers = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    return sorted({*powers, samples})


def mean_with_interval(values: Sequence[float], seed: int = 0, resamples: int = 2000) -> tuple[float, float, float]:
    """Return the mean over prompts with its 95 % interval (mean, low, high), by a percentile bootstrap over prompts."""
    array = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(array), (resamples, len(array)))
    low, high = np.quantile(array[drawn].mean(axis=1), [0.025, 0.975])
    return float(array.mean()), float(low), float(high)
