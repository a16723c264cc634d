"""Every method on the default task with the same budget: accuracy, cost and behaviour side by side, and one figure.

    python -m benchmarks.compare_methods                                   8 methods x 3 seeds
    python -m benchmarks.compare_methods --methods grpo,gspo --seeds 0     a quick look
    python -m benchmarks.compare_methods --report-only                     table and figure of what is there

Runs configs/<method>.yaml by main_rl.py, one after the other: seed 0 of all methods, then seed 1, and so on, so that a
comparison cut short is still fair. The same command again goes on where it stopped.

Budget: train.steps and train.updates_per_step are the same for all, as are prompts, responses per prompt, learning rate
and held-out prompts. What a method's own file adds is part of the method and costs extra: further prompts in place of
filtered groups (dapo), a critic and the steps that only it learns in (ppo). The columns of cost say how much.
More than one update per step, or ratios are 1 and most methods are the same.

Cost: GRPO's 30 steps with one update each take 160 s on 2 quiet cores, start-up of half a minute included. Expect about
200 s a run with two updates, more with a critic or refills: about an hour and a half for 24 runs. Each keeps its last
checkpoint, 0.3 GB.

Exit codes: 0 done, 1 a run failed (the others were made all the same), 2 a mistake in the arguments, 130 interrupted.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.comparison_report import finished, report
from configs.blocks.rl import RLConfig
from configs.reading import yaml_text
from configs.reading.load import load, to_yaml
from orchestration.run.atomic_files import write_atomically
from orchestration.run.console import clock
from orchestration.run.directory import CONFIG

METHODS = "grpo,dr_grpo,dapo,cispo,p3o,ppo,rloo,gspo"
TAIL_LINES = 20  # of a failed run's output


@dataclass(frozen=True)
class Job:
    """One run to make."""

    method: str
    seed: int
    path: Path  # its run directory
    config_file: str
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.method} seed {self.seed}"

    @property
    def log(self) -> Path:
        return self.path.with_name(f"{self.path.name}.log")


# ---- what to run ----


def planned(options: argparse.Namespace) -> list[Job]:
    """All runs in their order: every method with the first seed, then every method with the next."""
    fixed = (f"train.steps={options.steps}", f"train.updates_per_step={options.updates_per_step}")
    every = f"eval.every={eval_every(options.steps)}"
    return [
        Job(
            method,
            seed,
            options.out / f"{method}_seed{seed}",
            str(Path("configs") / f"{method}.yaml"),
            (f"run.seed={seed}", *fixed, every, *options.set),
        )
        for seed in options.seeds
        for method in options.methods
    ]


def eval_every(steps: int) -> int:
    """Steps between evaluations: about six in a run, one of them at half of the budget."""
    half = max(1, steps // 2)
    return min((d for d in range(1, half + 1) if half % d == 0), key=lambda d: abs(math.log(6 * d / steps)))


def waiting(jobs: Sequence[Job]) -> list[Job]:
    """The runs that are still to be made.

    Raises: ValueError when a configuration is refused, or a finished run in the way was made with other settings.
    """
    found = []
    for job in jobs:
        wanted = load(job.config_file, RLConfig, job.overrides, str(job.path))
        there = finished(job.path, job.method, job.seed)
        if there is None:
            found.append(job)
            continue
        other = difference(there.config, yaml_text.parse(to_yaml(wanted), CONFIG)[0])
        if other:
            raise ValueError(
                f"{job.path} holds a finished run with other settings: {other}; choose another --out, or move it away"
            )
    return found


def difference(there: dict[str, Any], wanted: dict[str, Any], above: str = "") -> str | None:
    """The first key with another value, as "train.steps is 20, not 30". A key that only one side has does not count:
    it came or went with a version of the schema."""
    for key in there:
        place = f"{above}{key}"
        if key not in wanted or place in ("run.dir", "run.name") or there[key] == wanted[key]:
            continue
        if not (isinstance(there[key], dict) and isinstance(wanted[key], dict)):
            return f"{place} is {there[key]}, not {wanted[key]}"
        if found := difference(there[key], wanted[key], f"{place}."):
            return found
    return None


# ---- running ----


@contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Raises: ValueError when another comparison is running in the folder: it would take our run for a dead one."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another comparison is running in {folder}; wait for it, or choose another --out"
            ) from None
        yield


def run_all(jobs: Sequence[Job], todo: Sequence[Job]) -> list[Job]:
    """Make the runs in `todo`; returns those that failed."""
    seconds: dict[str, list[float]] = {}
    for job in jobs:
        if job not in todo and (run := finished(job.path, job.method, job.seed)):
            seconds.setdefault(job.method, []).append(run.rows[-1]["time/since_start_seconds"])
    print(f"{len(jobs)} runs, {len(jobs) - len(todo)} of them finished before", flush=True)
    failed = []
    for place, job in enumerate(todo):
        left = seconds_left([job.method for job in todo[place:]], seconds)
        rest = "" if left is None else f"; about {clock(left)} left for all"
        print(f"[{place + 1}/{len(todo)}] {job.name}: output in {job.log}{rest}", flush=True)
        took = made(job)
        if took is None:
            failed.append(job)
        else:
            seconds.setdefault(job.method, []).append(took)
    return failed


def made(job: Job) -> float | None:
    """Train, say how it went; returns the seconds it took, None when it failed."""
    began = time.monotonic()
    code = train(job)
    took = time.monotonic() - began
    run = finished(job.path, job.method, job.seed)
    if code == 0 and run is not None:
        print(f"    held-out accuracy {run.accuracy[-1][1]:.3f} in {clock(took)}", flush=True)
        return took
    tail = job.log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    print(f"    FAILED with exit code {code}; the end of its output:", *tail, sep="\n    | ", flush=True)
    return None


def seconds_left(methods: Sequence[str], seconds: dict[str, list[float]]) -> float | None:
    """Wall-clock of runs to come, by the runs of the same method, or else of all; None before there was any."""
    known = [value for values in seconds.values() for value in values]
    return sum(fmean(seconds.get(method, known)) for method in methods) if known else None


def train(job: Job) -> int:
    """Run main_rl.py to its end; returns its exit code. What an earlier attempt left is moved aside."""
    if job.path.exists():
        print(f"    an unfinished run was there; it is now {move_aside(job)}", flush=True)
    command = [sys.executable, "main_rl.py", "--config", job.config_file, "--run-dir", str(job.path)]
    command += [part for override in job.overrides for part in ("--set", override)]
    with job.log.open("w", encoding="utf-8") as log:
        # In a session of its own: Ctrl-C reaches this process only, which then ends the run once and in order.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise


def move_aside(job: Job) -> Path:
    """Rename a run directory and its log to the first free <name>.unfinished<n>; returns the new directory."""
    n = 1
    while (aside := job.path.with_name(f"{job.path.name}.unfinished{n}")).exists():
        n += 1
    os.rename(job.path, aside)
    if job.log.exists():
        os.rename(job.log, aside.with_name(f"{aside.name}.log"))
    return aside


# ---- the command ----


def write_report(jobs: Sequence[Job], table: Path, figure: Path) -> None:
    """Write table and figure of the finished runs, and print the table.

    Raises: ValueError when no run is finished or they cannot be compared.
    """
    found = {job.name: finished(job.path, job.method, job.seed) for job in jobs}
    runs = [run for run in found.values() if run is not None]
    text = report(runs, [name for name, run in found.items() if run is None])
    from benchmarks.comparison_figure import draw  # late: runs need no matplotlib

    write_atomically(table, text)
    figure.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(figure, draw(runs))
    print(f"{text}\n{table}\n{figure}")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    signal.signal(signal.SIGTERM, interrupt)
    jobs, failed = planned(options), []
    try:
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("the figure needs matplotlib: make install-dev")
        if not options.report_only:
            todo = waiting(jobs)
            with sole_user(options.out):
                failed = run_all(jobs, todo)
        if len(failed) < len(jobs):
            write_report(jobs, options.out / "comparison.md", options.plot or options.out / "comparison.svg")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here, --report-only shows what is there", file=sys.stderr)
        return 130
    if failed:
        print(f"failed: {', '.join(job.name for job in failed)}; the same command tries again", file=sys.stderr)
    return 1 if failed else 0


def interrupt(number: int, frame: Any) -> None:
    """SIGTERM ends the run in progress as Ctrl-C does."""
    raise KeyboardInterrupt


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare_methods",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--methods",
        type=names,
        default=METHODS,
        metavar="A,B,...",
        help="names of files in configs/, without .yaml (default: %(default)s)",
    )
    parser.add_argument(
        "--seeds", type=numbers, default="0,1,2", metavar="N,N,...", help="run.seed (default: %(default)s)"
    )
    parser.add_argument("--steps", type=positive, default=30, metavar="N", help="train.steps (default: %(default)s)")
    parser.add_argument(
        "--updates-per-step",
        type=positive,
        default=2,
        metavar="N",
        help="train.updates_per_step (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/compare"),
        metavar="FOLDER",
        help="gets <method>_seed<seed>/ and its .log for each run, comparison.md, comparison.svg (default: %(default)s)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace one value in all configurations, e.g. train.learning_rate=1e-5; may be given several times",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.svg", help="where the figure goes, e.g. docs/methods_compare.svg"
    )
    parser.add_argument(
        "--report-only",
        action="store_true",
        help="run nothing; table and figure of the finished runs among --methods and --seeds in --out, of any one budget",
    )
    return parser.parse_args(arguments)


def names(text: str) -> list[str]:
    """ "a,b" as ["a", "b"]."""
    found = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise argparse.ArgumentTypeError("give one name at least, such as grpo,dapo")
    return found


def numbers(text: str) -> list[int]:
    if not all(part.isdecimal() for part in names(text)):
        raise argparse.ArgumentTypeError(f"must be whole numbers with commas between, such as 0,1,2; given {text!r}")
    return [int(part) for part in names(text)]


def positive(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0; given {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
