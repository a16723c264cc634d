"""Read the model's constants off a finished sync run, and another run's figures for comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulate_schedule.model import Costs, Plan, Work
from configs.blocks.rl import RLConfig
from configs.reading.load import load
from orchestration.run.directory import read_metrics
from orchestration.run.samples import read_samples, sample_steps

WARM_UP_STEPS = 2  # compilation and caches make the first steps slower than the rest
LEAST_STEPS = 3

Row = dict[str, float]


@dataclass(frozen=True)
class Calibration:
    """A run's constants, its work and its devices."""

    costs: Costs
    work: Work
    plan: Plan


@dataclass(frozen=True)
class Measured:
    """The figures of a run per step, without evaluation and checkpoints."""

    seconds_per_step: float
    tokens_per_second: float
    trainer_wait_seconds: float
    staleness_mean: float


def plan_of(run: Path) -> Plan:
    """Return the split and schedule of a run. An engine, whatever its tensor_parallel_size, is one generating device.

    Raise ValueError when its config.yaml cannot be read.
    """
    config = load(run / "config.yaml", RLConfig)
    schedule = config.schedule
    return Plan(
        generators=config.rollout.engines,
        trainers=config.train.ranks,
        max_staleness=schedule.staleness,
        in_flight=schedule.in_flight,
        over_issue=schedule.over_issue,
        pause_while_training=schedule.pause_while_training and schedule.mode == "overlap",
    )


def calibrate(run: Path) -> Calibration:
    """Return constants from the steps of a sync run, by least squares over steps.

    time/generate_seconds = longest response * decode_step_seconds + tokens per engine * decode_token_seconds, where
    each group's prompt counts too: a run does not tell prefilling from decoding. time/train_seconds =
    train_fixed_seconds + train/tokens per rank * seconds per token; tokens that are not trained on (groups without
    signal) make the latter smaller for each token generated. Engines are assumed to stand still for a whole sync.

    Raises:
        ValueError: the run is not in sync mode or has too few steps.
    """
    plan, rows = plan_of(run), steady_rows(run)
    if plan.max_staleness:
        raise ValueError(
            f"{run} is no sync run: in overlap both sides are timed together; calibrate on a run with mode: sync"
        )
    groups, responses = _group_lengths(run), fmean(row["rollout/responses"] for row in rows)
    group_size = fmean(len(lengths) for lengths in groups)
    prompt_tokens = fmean(row["rollout/prompt_tokens"] for row in rows)
    prompts = np.asarray([row["rollout/responses"] / group_size * prompt_tokens for row in rows])  # once a group
    generated = _column(rows, "rollout/tokens") + prompts
    decode_step, decode_token = _non_negative(
        _column(rows, "time/generate_seconds"),
        _column(rows, "rollout/response_tokens_max"),
        generated / plan.generators,
    )
    trained = _column(rows, "train/tokens") / plan.trainers
    train_fixed, train_token = _non_negative(_column(rows, "time/train_seconds"), np.ones(len(rows)), trained)
    sync = fmean(row["time/sync_seconds"] for row in rows)
    costs = Costs(
        decode_step_seconds=decode_step,
        decode_token_seconds=decode_token,
        prefill_token_seconds=decode_token,
        train_fixed_seconds=train_fixed + fmean(row["time/other_seconds"] for row in rows),
        train_token_seconds=train_token * float(trained.sum() * plan.trainers / generated.sum()),
        sync_seconds=sync,
        pause_seconds=sync,
        reward_seconds=fmean(row.get("time/reward_seconds", 0.0) for row in rows),
    )
    return Calibration(costs, Work(round(responses / group_size), round(prompt_tokens), drawn_from(groups)), plan)


def measure(run: Path) -> Measured:
    """Return the figures in a run's metrics. Raise ValueError when it has too few steps."""
    rows = steady_rows(run)
    seconds = [row["time/step_seconds"] - row["time/eval_seconds"] - row["time/checkpoint_seconds"] for row in rows]
    return Measured(
        seconds_per_step=fmean(seconds),
        tokens_per_second=sum(row["rollout/tokens"] for row in rows) / sum(seconds),
        trainer_wait_seconds=fmean(row["time/generate_seconds"] + row.get("time/reward_seconds", 0.0) for row in rows),
        staleness_mean=fmean(row["train/staleness_mean"] for row in rows if "train/staleness_mean" in row),
    )


def steady_rows(run: Path) -> list[Row]:
    """Return the lines of metrics.jsonl after the warm-up. Raise ValueError when they are too few."""
    rows = [row for row in read_metrics(run) if row["step"] > WARM_UP_STEPS and row.get("train/tokens", 0) > 0]
    if len(rows) < LEAST_STEPS:
        raise ValueError(
            f"{run}: {len(rows)} steps that trained after {WARM_UP_STEPS} of warm-up, and at least {LEAST_STEPS} are needed; "
            "give the directory of a longer run of main_rl.py"
        )
    return rows


def drawn_from(groups: list[list[int]]) -> Callable[[np.random.Generator], list[int]]:
    """Return a function that draws whole groups of measured lengths: responses to one prompt stay alike."""
    return lambda rng: groups[int(rng.integers(len(groups)))]


def _group_lengths(run: Path) -> list[list[int]]:
    """Return the response lengths of every group in samples/, warm-up left out."""
    groups: dict[str, list[int]] = {}
    for step in sample_steps(run):
        if step > WARM_UP_STEPS:
            for record in read_samples(run, step):
                groups.setdefault(f"{step}/{record['group']}", []).append(int(record["tokens"]))
    if not groups:
        raise ValueError(f"{run} has no samples/step_*.jsonl after {WARM_UP_STEPS} steps to read response lengths from")
    return list(groups.values())


def _column(rows: list[Row], name: str) -> NDArray[np.float64]:
    return np.asarray([row[name] for row in rows])


def _non_negative(target: NDArray[np.float64], *terms: NDArray[np.float64]) -> tuple[float, float]:
    """Return the least squares of two terms; a negative one (steps too alike to tell them apart) is left out."""
    factors = np.linalg.lstsq(np.stack(terms, axis=1), target, rcond=None)[0]
    for kept, other in ((0, 1), (1, 0)):
        if factors[other] < 0:
            alone = float(terms[kept] @ target / (terms[kept] @ terms[kept]))
            return (alone, 0.0) if kept == 0 else (0.0, alone)
    return float(factors[0]), float(factors[1])
