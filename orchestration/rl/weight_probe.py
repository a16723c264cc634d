"""The check after every sync: engine and trainer give the same tokens the same log-probabilities.

When both work in turn, engines continue a few prompts under the new weights and the trainer scores these tokens. While
training goes on that is impossible, because the trainer's weights have changed by then: so it scores tokens of the last
batch before it continues, and engines score the same tokens when they have loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from configs.blocks.rl import RLConfig
from orchestration.metrics.tally import Tally
from records.rollout import FloatArray, Trajectory
from rollouts.vllm.sampling import Sampling

# Largest mean |gap| in nats of healthy weights, with room: measured 6e-6 (float32) and 4e-2 (bfloat16, the noise of two
# implementations). Weights that were not synced measured 0.4 and more, a stale tied head 0.9, a stale cache 0.2.
TOLERANCE_BY_DTYPE = {"float32": 0.002, "bfloat16": 0.15}


class ProbeFailed(RuntimeError):
    """The error of an engine that disagrees with the trainer, because of other weights or another sampling."""


def tolerance_for(config: RLConfig) -> float:
    """Return the largest mean gap, in nats, with which a run continues: the configured one, or the dtype's."""
    return config.sync.probe_tolerance or TOLERANCE_BY_DTYPE[config.model.dtype]


def probe_sampling(config: RLConfig) -> Sampling:
    """Return how the compared continuations are drawn: short, and from the whole distribution. From a truncated one an
    engine returns renormalised log-probabilities, which the trainer does not compute."""
    sampling = Sampling.of_rollout(config.rollout, run_seed=config.run.seed)
    tokens = min(config.sync.probe_tokens, sampling.max_new_tokens)
    return dataclasses.replace(sampling, max_new_tokens=tokens, top_p=1.0, top_k=0, stop=())


def compare(engine_logprobs: Sequence[FloatArray], trainer_logprobs: Sequence[FloatArray], tolerance: float) -> Tally:
    """Compare the same sequences' log-probabilities, [T] float32 each, and return sync/probe_gap_*.

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
    mean_gap, max_gap = float(gaps.mean()), float(gaps.max())
    if mean_gap > tolerance:
        raise ProbeFailed(
            f"engine and trainer disagree on the log-probabilities of {len(gaps)} tokens the engine just sampled: "
            f"mean gap {mean_gap:.4g} nats (largest {max_gap:.4g}), allowed {tolerance:.4g} "
            f"(sync.probe_tolerance). Per sequence: {_by_sequence(engine_logprobs, trainer_logprobs)}. "
            "Likely causes: the engine did not take the new weights or not all of them (a gap of 0.1 and more); "
            "temperature, top-p or top-k differ between the two; keys and values cached under old weights; the two "
            "compute in different types (a gap of a few hundredths is ordinary for bfloat16)."
        )
    tally = Tally()
    tally.add("sync/probe_gap_mean", mean_gap)
    tally.maximum("sync/probe_gap_max", max_gap)
    return tally


def _by_sequence(engine_logprobs: Sequence[FloatArray], trainer_logprobs: Sequence[FloatArray]) -> str:
    gaps = [np.abs(a - b).mean() for a, b in zip(engine_logprobs, trainer_logprobs, strict=True) if len(a)]
    return ", ".join(f"{gap:.4g}" for gap in gaps[:8])


def probe_tokens(trajectories: Sequence[Trajectory], count: int, tokens: int, longest: int) -> list[Trajectory]:
    """Return the first generated tokens of `count` trajectories of different groups, or of fewer if there are fewer.

    longest: the limit on prompt and tokens together. A longer one loses the beginning of its prompt, which changes what
    is compared, but not that both sides compute the same.
    """
    chosen = {t.group_id: t for t in reversed(trajectories) if t.action_tokens}
    return [first_tokens(t, tokens, longest) for t in list(chosen.values())[-count:]]


def first_tokens(trajectory: Trajectory, tokens: int, longest: int) -> Trajectory:
    """Return a trajectory cut short, before an environment's first observation."""
    turn = int(np.argmin(trajectory.is_action)) if not trajectory.is_action.all() else len(trajectory.is_action)
    end = min(tokens, turn)
    cut = {
        name: getattr(trajectory, name)[:end]
        for name in ("token_ids", "behavior_logprobs", "versions", "is_action", "turn")
    }
    prompt_ids = trajectory.prompt_ids[max(0, len(trajectory.prompt_ids) + end - longest) :]
    return dataclasses.replace(trajectory, **cut, prompt_ids=prompt_ids)
