"""A run on disk that goes on: what a checkpoint keeps beside the weights, and how a run directory is brought back to it.

In a checkpoint's folder resume/ are trainer/ (what the trainer ranks wrote) and driver.json (what the loop needs).
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestration.run_directory import (
    METRICS_FILE,
    RESUME,
    RunDirectory,
    checkpoints,
    read_marker,
    sample_steps,
    samples_path,
    write_atomically,
)

if TYPE_CHECKING:
    from configs.block import Block

DRIVER_FILE, TRAINER_FOLDER = "driver.json", "trainer"
# What may differ between the run and its resumption: where things are and how often something is kept or looked at.
FREE_KEYS = (
    "run.name", "run.dir", "checkpoint", "failures", "replay", "eval.every", "data.cache_dir",
    "objective.reference_cache_dir",
)  # fmt: skip
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


def newest_resumable(run: RunDirectory) -> Path | None:
    """The run's newest complete checkpoint, when it holds a state to go on from; otherwise None."""
    ours = [path for path in checkpoints(run.path) if read_marker(path)["run_id"] == run.run_id]
    return ours[-1] if ours and (ours[-1] / RESUME / DRIVER_FILE).is_file() else None


def go_back(run: RunDirectory, checkpoint: Path) -> DriverState:
    """Bring the run directory to what it was after the checkpoint's step: later metrics, samples and replays go away."""
    state = DriverState.read(checkpoint)
    metrics = run.path / METRICS_FILE
    lines = metrics.read_text(encoding="utf-8").split("\n")[:-1] if metrics.exists() else []  # the last may be cut off
    kept = [line for line in lines if json.loads(line)["step"] <= state.step]
    write_atomically(metrics, "".join(line + "\n" for line in kept))
    if not kept or json.loads(kept[-1])["step"] < state.step:
        run.write_metrics(state.step, state.metrics)
    for heldout in (False, True):
        for step in sample_steps(run.path, heldout):
            if step > state.step:
                samples_path(run.path, step, heldout).unlink()
    for folder in (run.path / "replay").glob("step_*_update_*"):
        if int(folder.name.split("_")[1]) > state.step:
            shutil.rmtree(folder)
    return state


def changed_keys(before: Block, now: Block) -> list[str]:
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
