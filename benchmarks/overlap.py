"""Overlap against sync on a CPU, one core or more for each side: seconds per step, and wall-clock to a target reward.

    python -m benchmarks.overlap [--seeds 0 1 2] [--steps 24] [--target 0.7]
    python -m benchmarks.overlap --same-work [--trained CHECKPOINT]

Runs the default job for every seed, one run after the other:
  sync     configs/grpo.yaml, trainer and engine in turn, each with its half of the cores: the fair comparison, since on
           a cluster the two sides have devices of their own
  overlap  configs/grpo_overlap.yaml, the same halves at the same time, max_staleness 1
  shared   sync, each side with all cores: what one machine can also do (only with --shared)
and prints the mean step against the mean of every step's longer side (aim: at most 1.15; which side that is changes as
responses get shorter), and the seconds until the mean reward of five steps reaches the target. The first two steps and
the last, in which nothing overlaps, are left out; evaluations, checkpoints and start-up too, on all sides.

A policy that learns with older tokens writes other responses, so that the two modes' steps are not the same work.
--same-work compares equal work: 12 steps at a learning rate of almost 0, of the model as it is (16 tokens a response:
training is the longer side) and of a trained one (3 tokens: generation is). Overlap is compared with the sides of sync.

About 3 minutes a run on 2 cores, 1 to 2 with --same-work; runs that are there already are not run again.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from orchestration.run.directory import checkpoints, read_metrics

HALVES = ["placement.trainer_cores={half}", "placement.engine_cores={half}"]
JOBS = {
    "sync": ("configs/grpo.yaml", HALVES),
    "overlap": ("configs/grpo_overlap.yaml", [*HALVES, "placement.bind_cores=true"]),
    "shared": ("configs/grpo.yaml", []),
}
SMOOTHED_STEPS = 5
SAME_WORK_STEPS = 12
FILLING_STEPS = 2  # until both sides have work
LEFT_OUT = ("eval", "checkpoint")


@dataclass(frozen=True)
class Run:
    """The figures of one run, in seconds where nothing else is said."""

    step: float  # mean, evaluations and checkpoints left out
    generate: float  # mean; in overlap, of the time in which the engine had a response running
    train: float
    longer: float  # mean of every step's longer one of the two
    sync: float
    to_target: float | None
    final_reward: float  # mean of the last steps
    staleness: float  # mean over trained tokens, mean of the last steps
    heldout: float | None  # greedy, at the end

    @classmethod
    def of(cls, folder: Path, target: float) -> Run:
        rows = [row for row in read_metrics(folder) if row["step"] > 0]
        steps = [step_seconds(row) for row in rows]
        rewards = [row["reward/mean"] for row in rows]
        smooth = [statistics.fmean(rewards[max(0, i - SMOOTHED_STEPS + 1) : i + 1]) for i in range(len(rows))]
        reached = next((i for i, reward in enumerate(smooth) if reward >= target and i + 1 >= SMOOTHED_STEPS), None)
        steady = rows[FILLING_STEPS:-1]
        return cls(
            step=statistics.fmean(map(step_seconds, steady)),
            generate=statistics.fmean(map(generate_seconds, steady)),
            train=statistics.fmean(row["time/train_seconds"] for row in steady),
            longer=statistics.fmean(max(generate_seconds(row), row["time/train_seconds"]) for row in steady),
            sync=statistics.fmean(row["time/sync_seconds"] for row in steady),
            to_target=None if reached is None else sum(steps[: reached + 1]),
            final_reward=statistics.fmean(rewards[-SMOOTHED_STEPS:]),
            staleness=statistics.fmean(row["train/staleness_mean"] for row in rows[-SMOOTHED_STEPS:]),
            heldout=rows[-1].get("eval/greedy_accuracy"),
        )


def step_seconds(row: dict[str, float]) -> float:
    return row["time/step_seconds"] - sum(row[f"time/{phase}_seconds"] for phase in LEFT_OUT)


def generate_seconds(row: dict[str, float]) -> float:
    """Return the engine's seconds: in sync mode those that the driver waited, in overlap mode those it was busy."""
    return row.get("schedule/engine_busy_seconds", row["time/generate_seconds"])


def made(kind: str, seed: int, steps: int, folder: Path, *more: str) -> Path:
    """Return the folder of a finished run; run it first if it is not there. more: settings."""
    if folder.exists() and any(row["step"] == steps for row in read_metrics(folder)):
        return folder
    half = max(1, len(os.sched_getaffinity(0)) // 2)
    config, settings = JOBS[kind]
    command = [sys.executable, "main_rl.py", "--config", config, "--run-dir", str(folder)]
    for setting in [f"run.seed={seed}", f"train.steps={steps}", "eval.every=0", *settings, *more]:
        command += ["--set", setting.format(half=half)]
    print(" ".join(command[1:]), flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=24, help="training steps of each run (default: %(default)s)")
    parser.add_argument("--target", type=float, default=0.7, help="mean reward over 5 steps (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/overlap"), help="default: %(default)s")
    parser.add_argument("--shared", action="store_true", help="also sync on all cores")
    parser.add_argument("--same-work", action="store_true", help="nothing is learned: the same steps in both modes")
    parser.add_argument(
        "--trained", type=Path, help="of --same-work: the trained model (default: of overlap's first seed in --out)"
    )
    options = parser.parse_args()
    if options.same_work:
        same_work(options.out, options.trained or newest_checkpoint(options.out / f"overlap_seed{options.seeds[0]}"))
        return
    kinds = ["sync", "overlap"] + (["shared"] if options.shared else [])
    runs = {
        (kind, seed): Run.of(made(kind, seed, options.steps, options.out / f"{kind}_seed{seed}"), options.target)
        for seed in options.seeds
        for kind in kinds
    }
    report(runs, kinds, options.seeds, options.target)


def newest_checkpoint(run: Path) -> Path:
    found = checkpoints(run)
    if not found:
        raise SystemExit(f"{run} has no checkpoint; run the seeds first, or say --trained CHECKPOINT")
    return found[-1]


def same_work(out: Path, trained: Path) -> None:
    """Compare both modes at a learning rate of almost 0."""
    print("seconds; nothing is learned, so that both modes do the same work")
    print(
        "model                         mode      step  generate  train   sync   step / longer side of sync, of its own"
    )
    for name, settings in (
        ("as it comes, long responses", []),
        ("trained, short responses", [f"model.path={trained}"]),
    ):
        runs = {}
        for kind in ("sync", "overlap"):
            folder = out / f"same_work_{'trained' if settings else 'base'}_{kind}"
            still = [*settings, "train.learning_rate=1e-12", "eval.max_prompts=4"]
            run = runs[kind] = Run.of(made(kind, 0, SAME_WORK_STEPS, folder, *still), target=1.0)
            sides = f"{run.step / max(runs['sync'].generate, runs['sync'].train):>13.2f} {run.step / run.longer:>12.2f}"
            print(
                f"{name:<29} {kind:<8} {run.step:>5.2f} {run.generate:>9.2f} {run.train:>6.2f} {run.sync:>6.2f} {sides}",
                flush=True,
            )


def report(runs: dict[tuple[str, int], Run], kinds: list[str], seeds: list[int], target: float) -> None:
    print(f"\nseconds; to target: until the mean reward of {SMOOTHED_STEPS} steps is {target:g}")
    print("run      seed   step  generate  train   sync  to target  final reward  held-out  staleness")
    for (kind, seed), run in runs.items():
        reached = "never" if run.to_target is None else f"{run.to_target:.0f}"
        heldout = "-" if run.heldout is None else f"{run.heldout:.3f}"
        print(
            f"{kind:<8} {seed:>4} {run.step:>6.2f} {run.generate:>9.2f} {run.train:>6.2f} {run.sync:>6.2f} {reached:>10} "
            f"{run.final_reward:>13.3f} {heldout:>9} {run.staleness:>10.2f}"
        )
    for seed in seeds:
        overlap = runs["overlap", seed]
        print(
            f"seed {seed}: overlap's step / every step's longer side {overlap.step / overlap.longer:.2f}, "
            f"/ the longer of the means {overlap.step / max(overlap.generate, overlap.train):.2f}, "
            f"/ sync's step {overlap.step / runs['sync', seed].step:.2f}"
        )
        for kind in kinds:
            other = runs[kind, seed]
            if kind != "overlap" and other.to_target and overlap.to_target:
                print(f"  to target: {kind} / overlap = {other.to_target / overlap.to_target:.2f}")


if __name__ == "__main__":
    main()
