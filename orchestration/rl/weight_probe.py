"""The proof after every sync: engine and trainer give the same tokens the same log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from configs.blocks.rl import RLConfig
from records.rollout import FloatArray

# Largest mean |gap| in nats of healthy weights, with room: measured 6e-6 (float32) and 4e-2 (bfloat16, the noise of two
# implementations). Weights that were not synced measured 0.4 and more, a stale tied head 0.9, a stale cache 0.2.
TOLERANCE_BY_DTYPE = {"float32": 0.002, "bfloat16": 0.15}


class ProbeFailed(RuntimeError):
    """Engine and trainer disagree: the engine does not hold the trainer's weights, or samples from something else."""


@dataclass(frozen=True)
class ProbeResult:
    """Differences of log-probabilities in nats, over all tokens of all probe continuations."""

    mean_gap: float  # mean |engine - trainer|
    max_gap: float
    tokens: int


def tolerance_for(config: RLConfig) -> float:
    """The mean gap that lets a run go on: the config's, or that of its compute type."""
    return config.sync.probe_tolerance or TOLERANCE_BY_DTYPE[config.model.dtype]


def compare(
    engine_logprobs: Sequence[FloatArray], trainer_logprobs: Sequence[FloatArray], tolerance: float
) -> ProbeResult:
    """Compare the same sequences' log-probabilities; each entry is one sequence's [T] float32.

    Raises:
        ProbeFailed: the mean gap is above `tolerance`, or a value is not a finite number.
    """
    assert [len(a) for a in engine_logprobs] == [len(b) for b in trainer_logprobs], "not the same sequences"
    engine = np.concatenate(engine_logprobs).astype(np.float64)
    trainer = np.concatenate(trainer_logprobs).astype(np.float64)
    assert len(engine) > 0, "a probe without tokens proves nothing"
    for side, values in (("engine", engine), ("trainer", trainer)):
        bad = int((~np.isfinite(values)).sum())
        if bad:
            raise ProbeFailed(f"{bad} of {len(values)} probe log-probabilities of the {side} are not finite numbers")
    gaps = np.abs(engine - trainer)
    result = ProbeResult(float(gaps.mean()), float(gaps.max()), len(gaps))
    if result.mean_gap > tolerance:
        raise ProbeFailed(
            f"engine and trainer disagree on the log-probabilities of {result.tokens} tokens the engine just sampled: "
            f"mean gap {result.mean_gap:.4g} nats (largest {result.max_gap:.4g}), allowed {tolerance:.4g} "
            f"(sync.probe_tolerance). Per sequence: {_by_sequence(engine_logprobs, trainer_logprobs)}. "
            "Likely causes: the engine did not take the new weights or not all of them (a gap of 0.1 and more); "
            "temperature, top-p or top-k differ between the two; keys and values cached under old weights; the two "
            "compute in different types (a gap of a few hundredths is ordinary for bfloat16)."
        )
    return result


def _by_sequence(engine_logprobs: Sequence[FloatArray], trainer_logprobs: Sequence[FloatArray]) -> str:
    gaps = [np.abs(a - b).mean() for a, b in zip(engine_logprobs, trainer_logprobs, strict=True) if len(a)]
    return ", ".join(f"{gap:.4g}" for gap in gaps[:8])
