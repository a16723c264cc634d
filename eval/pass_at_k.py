"""Unbiased pass@k, and how sure one can be of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Probability that at least one of k samples, drawn without replacement from `samples` of which `correct` passed,
    passes: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, equation 1).

    Raises:
        ValueError: k is larger than the number of samples, for which no unbiased estimate exists.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs between k and more samples per prompt, there are {samples}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def ks_up_to(samples: int) -> list[int]:
    """1, 2, 4, ... and `samples` itself."""
    powers = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    return sorted({*powers, samples})


def mean_with_interval(values: Sequence[float], seed: int = 0, resamples: int = 2000) -> tuple[float, float, float]:
    """Mean over prompts with its 95 % interval, by resampling prompts (percentile bootstrap)."""
    array = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(array), (resamples, len(array)))
    low, high = np.quantile(array[drawn].mean(axis=1), [0.025, 0.975])
    return float(array.mean()), float(low), float(high)
