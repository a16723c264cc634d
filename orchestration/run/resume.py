"""A run on disk that goes on: what a checkpoint keeps beside the weights, and how a run directory is brought back to it.

In a checkpoint's folder resume/ are trainer/ (what the trainer ranks wrote) and driver.json (what the loop needs).
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.blocks.supervised import SLConfig
from configs.reading.load import ConfigError, load, run_directory, to_yaml
from orchestration.metrics.step_clock import due
from orchestration.run.atomic_files import write_atomically
from orchestration.run.directory import (
    CAPTURED_STEPS,
    CONFIG,
    ENVIRONMENT,
    METRICS_FILE,
    RESUME,
    RunDirectory,
    checkpoints,
    read_marker,
    read_metrics,
)
from orchestration.run.provenance import describe_provenance
from orchestration.run.samples import sample_steps, samples_path

if TYPE_CHECKING:
    from configs.blocks.rl import RLConfig
    from records.rollout import Group

DRIVER_FILE, TRAINER_FOLDER, REUSE_FILE = "driver.json", "trainer", "reuse.pickle"
# What may differ between the run and its resumption: where things are, how often something is kept or looked at, and the way
# that the same weights take.
FREE_KEYS = (
    "run.name", "run.dir", "checkpoint", "failures", "capture", "sync", "eval.every", "data.cache_dir",
    "objective.reference_cache_dir",
)  # fmt: skip
MACHINE = ("packages", "cpus", "gpus")  # of environment.json: what sums may be rounded differently by
LENGTH_KEYS = ("train.steps", "train.epochs")  # they bend the learning rate, unless it is constant


@dataclass(frozen=True)
class DriverState:
    """What the loop must know after step `step`, beside the trainer's own state. Values as JSON can hold them."""

    step: int
    ranks: int  # of the trainer
    sampler: dict[str, Any]  # its state_dict as it was when the step's batch was drawn
    metrics: dict[str, float]  # the step's line, written at resumption if the run was killed before it wrote it
    version: int = 0  # of the policy
    accuracies: list[float] = field(default_factory=list)  # held-out, in order
    unfinished: list[Any] = field(default_factory=list)  # what had been asked and not been trained on

    def write(self, checkpoint: Path) -> None:
        """Put it into a checkpoint that is being written."""
        (checkpoint / RESUME).mkdir(exist_ok=True)
        write_atomically(checkpoint / RESUME / DRIVER_FILE, json.dumps(dataclasses.asdict(self)) + "\n")

    @classmethod
    def read(cls, checkpoint: Path) -> DriverState:
        """Of a finished checkpoint that can be resumed from."""
        return cls(**json.loads((checkpoint / RESUME / DRIVER_FILE).read_text(encoding="utf-8")))


def trainer_folder(checkpoint: Path) -> Path:
    """Where the trainer ranks keep their state in a checkpoint."""
    return checkpoint / RESUME / TRAINER_FOLDER


def write_reuse(checkpoint: Path, kept: list[tuple[int, Group]]) -> None:
    """Put the groups that may be trained on again into a checkpoint that is being written."""
    (checkpoint / RESUME / REUSE_FILE).write_bytes(pickle.dumps(kept))


def read_reuse(checkpoint: Path) -> list[tuple[int, Group]]:
    """What `write_reuse` wrote. Unpickles: open only checkpoints you trust."""
    kept: list[tuple[int, Group]] = pickle.loads((checkpoint / RESUME / REUSE_FILE).read_bytes())
    return kept


def newest_resumable(run: RunDirectory) -> Path | None:
    """The run's newest complete checkpoint, when it holds a state to go on from; otherwise None."""
    ours = [path for path in checkpoints(run.path) if read_marker(path)["run_id"] == run.run_id]
    return ours[-1] if ours and (ours[-1] / RESUME / DRIVER_FILE).is_file() else None


def way_on(run: RunDirectory) -> str:
    """For a run that ends before its time: the sentence that says how to go on."""
    kept = checkpoints(run.path)
    if not kept:
        return "There is no checkpoint to go on from."
    if newest_resumable(run) is None:
        return f"{kept[-1]} holds its weights, and no state for --resume (checkpoint.resume_state is false)."
    return f"Go on from {kept[-1]} with --resume."


def go_back(run: RunDirectory, checkpoint: Path, config: RLConfig | SLConfig) -> DriverState:
    """Bring the run directory to what it was after the checkpoint's step: later metrics, samples and captured steps go away. The
    step's line is there afterwards, unless the step is still to be judged."""
    state = DriverState.read(checkpoint)
    if _forget_after(run, state.step) < state.step and not owes_evaluation(run, state, config):
        run.write_metrics(state.step, state.metrics)
    return state


def owes_evaluation(run: RunDirectory, state: DriverState, config: RLConfig | SLConfig) -> bool:
    """Whether the checkpoint's step was trained and is still to be judged: the checkpoint is one that was written because the
    run could not go on, as when all engines are lost."""
    if isinstance(config, SLConfig) or not due(state.step, config.eval.every, config.train.steps):
        return False
    has_line = any(row["step"] == state.step for row in read_metrics(run.path))
    return not has_line and "eval/accuracy" not in state.metrics


def begin_anew(run: RunDirectory) -> None:
    """Bring the run directory to what it was before step 0."""
    _forget_after(run, -1)


def _forget_after(run: RunDirectory, last: int) -> int:
    """Remove what later steps wrote; returns the last step that is left in the metrics, -1 if there is none."""
    metrics = run.path / METRICS_FILE
    lines = metrics.read_text(encoding="utf-8").split("\n")[:-1] if metrics.exists() else []  # the last may be cut off
    kept = [line for line in lines if json.loads(line)["step"] <= last]
    write_atomically(metrics, "".join(line + "\n" for line in kept))
    for heldout in (False, True):
        for step in sample_steps(run.path, heldout):
            if step > last:
                samples_path(run.path, step, heldout).unlink()
    for folder in (run.path / CAPTURED_STEPS).glob("step_*_update_*"):
        if int(folder.name.split("_")[1]) > last:
            shutil.rmtree(folder)
    return json.loads(kept[-1])["step"] if kept else -1


def opened_to_resume(config: RLConfig | SLConfig, ranks: int) -> RunDirectory:
    """The run in the configured run directory, with `resumed_from`. Nothing is written.

    Raises:
        ConfigError: there is no run, no checkpoint to go on from, or going on would give other numbers than the run would have
            given by itself: a key or the number of trainer ranks differs.
    """
    path = run_directory(config)
    try:
        run = RunDirectory.opened(path)
    except ValueError as error:
        raise ConfigError(f"--resume: {error}; leave --resume away to begin it") from error
    run.resumed_from = newest_resumable(run)
    if run.resumed_from is None:
        found = checkpoints(path)
        raise ConfigError(
            f"--resume: {found[-1]} holds weights only (checkpoint.resume_state was false); begin a new run with model.path set "
            "to it" if found else
            f"--resume: {path} has no checkpoint to go on from; remove it and begin anew, with checkpoint.every set"
        )  # fmt: skip
    try:
        before = load(path / CONFIG, type(config))
    except ConfigError as error:
        raise ConfigError(
            f"--resume: this version does not accept the run's own configuration: {error}\nSet this right in {path / CONFIG}, or "
            f"begin a new run with model.path={run.resumed_from}"
        ) from error
    changed = changed_keys(before, config)
    if changed:
        raise ConfigError(
            f"--resume: the configuration differs from {path / CONFIG} in {', '.join(changed)}, which changes the numbers; set "
            f"them back, or begin a new run with model.path={run.resumed_from}"
        )
    state = DriverState.read(run.resumed_from)
    if state.ranks != ranks:
        raise ConfigError(
            f"--resume: {run.resumed_from} was written by {state.ranks} trainer rank(s), now there are {ranks}; use {state.ranks}"
        )
    return run


def take_up(run: RunDirectory, config: RLConfig | SLConfig) -> list[str]:
    """Go back to the checkpoint and note the resumption in config.yaml and environment.json: the first rank's. Returns what
    differs on this machine, for a warning."""
    assert run.resumed_from is not None
    step = go_back(run, run.resumed_from, config).step
    write_atomically(run.path / CONFIG, to_yaml(config))
    file = run.path / ENVIRONMENT
    noted, now = json.loads(file.read_text(encoding="utf-8")), describe_provenance()
    before = noted["resumed"][-1] if noted.get("resumed") else noted
    noted.setdefault("resumed", []).append({"step": step, **now})
    write_atomically(file, json.dumps(noted, indent=2) + "\n")
    differing = [name for name in MACHINE if before[name] != now[name]]
    if not differing:
        return []
    changes = "; ".join(f"{name} were {before[name]}, now {now[name]}" for name in differing)
    return [f"--resume: {changes}: numbers may differ from those of a run never stopped, in their last digits"]


def changed_keys(before: RLConfig | SLConfig, now: RLConfig | SLConfig) -> list[str]:
    """Dotted keys that differ between two configurations and change a run's numbers, sorted."""
    one, two = dict(_leaves(before.model_dump())), dict(_leaves(now.model_dump()))
    absent = object()
    differing = {key for key in one.keys() | two.keys() if one.get(key, absent) != two.get(key, absent)}
    free = FREE_KEYS + (LENGTH_KEYS if two.get("train.schedule") == "constant" else ())
    return sorted(key for key in differing if not any(key == name or key.startswith(f"{name}.") for name in free))


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; list items go by number, an empty block or list is itself a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    if not items:
        yield key, value
    for name, below in items:
        yield from _leaves(below, f"{key}.{name}" if key else str(name))
