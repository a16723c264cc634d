"""Resume a run: what a checkpoint keeps beside the weights, and how a run directory is brought back to a checkpoint.

Beside checkpoints/step_N, resume/step_N holds trainer/ (the state of the trainer ranks), driver.json (the state of the
loop) and, with a replay buffer, its groups. All files are compared with the checkpoint's marker before one is loaded.
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

from configs.reading.load import ConfigError, load, run_directory, to_yaml
from orchestration.metrics.step_clock import due
from orchestration.run.atomic_files import write_atomically
from orchestration.run.checksums import Damaged, checksum, complaints, read_marker, shortened
from orchestration.run.directory import (
    CAPTURED_STEPS,
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    METRICS_FILE,
    RunDirectory,
    read_metrics,
    state_folder,
    whole_lines,
)
from orchestration.run.provenance import describe_provenance
from orchestration.run.samples import sample_steps, samples_path

if TYPE_CHECKING:
    from configs.blocks.rl import RLConfig
    from configs.blocks.supervised import SLConfig
    from records.rollout import Group

DRIVER_FILE, TRAINER_FOLDER, REPLAY_BUFFER_FILE = "driver.json", "trainer", "replay_buffer.pickle"
# These keys may change when a run is resumed, because they change no number: where things are, how often something is
# saved or evaluated, and how the same weights travel.
FREE_KEYS = (
    "run.name", "run.dir", "checkpoint", "failures", "capture", "sync", "eval.every", "data.cache_dir",
    "objective.reference_cache_dir",
)  # fmt: skip
MACHINE = ("packages", "cpus", "gpus")  # keys of environment.json that can change how sums are rounded
LENGTH_KEYS = ("train.steps", "train.epochs")  # they change the learning rate, unless it is constant


@dataclass(frozen=True)
class DriverState:
    """The loop's state after step `step`. The trainer's own state is kept apart. All values fit into JSON."""

    step: int
    ranks: int  # number of trainer ranks
    sampler: dict[str, Any]  # the sampler's state_dict when the step's batch was drawn
    metrics: dict[str, float]  # the step's metrics, written at resumption if the run was killed before it wrote them
    version: int = 0  # the policy's version
    accuracies: list[float] = field(default_factory=list)  # held-out accuracies, in order
    unfinished: list[Any] = field(default_factory=list)  # group requests that were submitted and not trained on

    def write(self, checkpoint: Path) -> None:
        """Write this state into a checkpoint that is being written."""
        state_folder(checkpoint).mkdir(parents=True, exist_ok=True)
        write_atomically(state_folder(checkpoint) / DRIVER_FILE, json.dumps(dataclasses.asdict(self)) + "\n")

    @classmethod
    def read(cls, checkpoint: Path) -> DriverState:
        """Return the state in a finished checkpoint that can be resumed from."""
        return cls(**json.loads((state_folder(checkpoint) / DRIVER_FILE).read_text(encoding="utf-8")))


def trainer_folder(checkpoint: Path) -> Path:
    """Return the folder of a checkpoint in which the trainer ranks keep their state."""
    return state_folder(checkpoint) / TRAINER_FOLDER


def write_replay_buffer(checkpoint: Path, versions_and_groups: list[tuple[int, Group]]) -> None:
    """Write the groups of the replay buffer into a checkpoint that is being written."""
    (state_folder(checkpoint) / REPLAY_BUFFER_FILE).write_bytes(pickle.dumps(versions_and_groups))


def read_replay_buffer(checkpoint: Path) -> list[tuple[int, Group]]:
    """Return the groups that `write_replay_buffer` wrote. They are unpickled, so open only checkpoints you trust."""
    versions_and_groups: list[tuple[int, Group]] = pickle.loads(
        (state_folder(checkpoint) / REPLAY_BUFFER_FILE).read_bytes()
    )
    return versions_and_groups


def newest_resumable(run: RunDirectory) -> Path | None:
    """Return the run's newest checkpoint that is as it was written, with its state; None when there is none.

    Newer ones, which are damaged, are then in `run.damaged`. A whole one that was written without a state ends the
    search: what came before it is not gone back to. Every file is read.
    """
    run.damaged = {}
    folders = [p for p in (run.path / CHECKPOINTS).glob("step_*") if p.name.removeprefix("step_").isdecimal()]
    for path in sorted(folders, key=lambda p: int(p.name.removeprefix("step_")), reverse=True):
        try:
            marker = read_marker(path)
            if marker["run_id"] != run.run_id:
                continue
            state, damage = state_folder(path), complaints(path, marker["files"])
            if not damage and not marker["state"]:
                return None
            damage += complaints(state, marker["state"]) if state.is_dir() else [f"its state {state} is missing"]
        except Damaged as error:
            damage = [str(error)]
        if not damage:
            return path
        run.damaged[path] = shortened(damage)
    return None


def how_to_resume(run: RunDirectory) -> str:
    """Return the sentence that says how to continue a run that ended too early."""
    complete = run.checkpoints()
    if not complete:
        return "There is no checkpoint to go on from."
    if not state_folder(complete[-1]).is_dir():
        return f"{complete[-1]} holds its weights, and no state for --resume (checkpoint.resume_state is false)."
    return f"Go on from {complete[-1]} with --resume."


def restore_run(run: RunDirectory, checkpoint: Path, config: RLConfig | SLConfig) -> DriverState:
    """Bring the run directory back to the checkpoint's step, and return the loop's state at that step.

    Later metrics, samples and captured steps are removed. The step's metrics are written if they are missing, unless
    the step is still to be evaluated.
    """
    state = DriverState.read(checkpoint)
    if _forget_after(run, state.step) < state.step and not owes_evaluation(run, state, config):
        run.write_metrics(state.step, state.metrics)
    return state


def owes_evaluation(run: RunDirectory, state: DriverState, config: RLConfig | SLConfig) -> bool:
    """Return whether the checkpoint's step was trained but not yet evaluated.

    This is so when the checkpoint was written because the run could not go on, as when all engines are lost. A
    supervised job has no accuracies, and owes none.
    """
    if not state.accuracies or not due(state.step, config.eval.every, config.train.steps or 0):
        return False
    has_line = any(row["step"] == state.step for row in read_metrics(run.path))
    return not has_line and "eval/accuracy" not in state.metrics


def restart_run(run: RunDirectory) -> None:
    """Bring the run directory back to the time before step 0."""
    _forget_after(run, -1)


def _forget_after(run: RunDirectory, last: int) -> int:
    """Remove what steps after `last` wrote, and return the last step left in the metrics, -1 if there is none."""
    metrics = run.path / METRICS_FILE
    lines, damage = whole_lines(metrics) if metrics.exists() else ([], "")
    if damage:
        raise ValueError(f"{damage}; --resume keeps a copy of the file and goes on with its whole lines")
    kept_lines = [line.decode() for line in lines if json.loads(line)["step"] <= last]
    write_atomically(metrics, "".join(kept_lines))
    for heldout in (False, True):
        for step in sample_steps(run.path, heldout):
            if step > last:
                samples_path(run.path, step, heldout).unlink()
    for folder in (run.path / CAPTURED_STEPS).glob("step_*_update_*"):
        if int(folder.name.split("_")[1]) > last:
            shutil.rmtree(folder)
    return json.loads(kept_lines[-1])["step"] if kept_lines else -1


def opened_to_resume(config: RLConfig | SLConfig, ranks: int) -> RunDirectory:
    """Return the run in the configured run directory, with `resumed_from` set. Nothing is written.

    Raises:
        ConfigError: there is no run, there is no checkpoint to resume from, or the resumed run would give other numbers
            because a key or the number of trainer ranks differs.
    """
    path = run_directory(config)
    try:
        run = RunDirectory.opened(path)
    except ValueError as error:
        way_out = "leave --resume away to begin it" if not (path / ENVIRONMENT).exists() else "bring the file back"
        raise ConfigError(f"--resume: {error}; {way_out}") from error
    run.resumed_from = newest_resumable(run)
    if run.resumed_from is None:
        raise ConfigError(f"--resume: {_why_none(run)}")
    try:
        before = load(path / CONFIG, type(config))
    except ConfigError as error:
        raise ConfigError(
            f"--resume: this version of FeynRL does not accept the run's own configuration: {error}\nCorrect it in "
            f"{path / CONFIG}, or begin a new run with model.path={run.resumed_from}"
        ) from error
    changed = changed_keys(before, config)
    if changed:
        raise ConfigError(
            f"--resume: the configuration differs from {path / CONFIG} in {', '.join(changed)}, which changes the "
            f"numbers; set them back, or begin a new run with model.path={run.resumed_from}"
        )
    state = DriverState.read(run.resumed_from)
    if state.ranks != ranks:
        raise ConfigError(
            f"--resume: {run.resumed_from} was written by {state.ranks} trainer rank(s), now there are {ranks}; use "
            f"{state.ranks}"
        )
    return run


def _why_none(run: RunDirectory) -> str:
    """Return why there is no checkpoint to go on from, and the way out."""
    ours = run.checkpoints()
    if run.damaged:
        each = "\n  ".join(f"{path}: {damage}" for path, damage in run.damaged.items())
        return f"no checkpoint is whole, so there is none to go on from; begin a new run\n  {each}"
    if ours:
        return f"{ours[-1]} holds weights only (checkpoint.resume_state was false); begin a new run with model.path set to it"
    if any((run.path / CHECKPOINTS).glob("step_*")):
        return f"no checkpoint in {run.path / CHECKPOINTS} is of this run (run_id in {ENVIRONMENT} is {run.run_id})"
    return f"{run.path} has no checkpoint to go on from; remove it and begin anew, with checkpoint.every set"


def _rescue_metrics(run: RunDirectory, checkpoint: Path) -> list[str]:
    """Compare metrics.jsonl with what the checkpoint says of it. If it differs, keep a copy of it beside it, leave the
    whole lines, and return a warning."""
    file, (size, sum_) = run.path / METRICS_FILE, read_marker(checkpoint)["metrics"]
    if not file.exists():
        return [f"--resume: {file} is missing; the curves begin at the checkpoint"] if size else []
    lines, damage = whole_lines(file)
    if not damage and file.stat().st_size >= size and (not size or checksum(file, size) == sum_):
        return []
    copy = file.with_name(f"{file.name}.damaged")
    shutil.copyfile(file, copy)
    write_atomically(file, b"".join(lines).decode())
    why = damage or f"{file} is damaged: its first {size} bytes are not those written before {checkpoint.name}"
    return [f"--resume: {why}; it was set aside as {copy.name}, and its whole lines are kept"]


def resume_run(run: RunDirectory, config: RLConfig | SLConfig) -> list[str]:
    """Bring the run directory back to the checkpoint, and note the resumption in config.yaml and environment.json.

    Only the first rank may call this. Return warnings about what differs on this machine.
    """
    assert run.resumed_from is not None
    warnings = [f"--resume: {said}" for said in run.set_aside_damaged()] + _rescue_metrics(run, run.resumed_from)
    step = restore_run(run, run.resumed_from, config).step
    write_atomically(run.path / CONFIG, to_yaml(config))
    file = run.path / ENVIRONMENT
    provenance, now = json.loads(file.read_text(encoding="utf-8")), describe_provenance()
    before = provenance["resumed"][-1] if provenance.get("resumed") else provenance
    provenance.setdefault("resumed", []).append({"step": step, **now})
    write_atomically(file, json.dumps(provenance, indent=2) + "\n")
    differing = [name for name in MACHINE if before[name] != now[name]]
    if differing:
        changes = "; ".join(f"{name} were {before[name]}, now {now[name]}" for name in differing)
        warnings.append(
            f"--resume: {changes}; the last digits of numbers may differ from those of a run that was never stopped"
        )
    return warnings


def changed_keys(before: RLConfig | SLConfig, now: RLConfig | SLConfig) -> list[str]:
    """Return the dotted keys that differ between two configurations and change a run's numbers, sorted."""
    old, new = dict(_leaves(before.model_dump())), dict(_leaves(now.model_dump()))
    absent = object()
    differing = {key for key in old.keys() | new.keys() if old.get(key, absent) != new.get(key, absent)}
    free = FREE_KEYS + (LENGTH_KEYS if new.get("train.schedule") == "constant" else ())
    return sorted(key for key in differing if not any(key == name or key.startswith(f"{name}.") for name in free))


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys with their values. List items have numbers as keys; an empty block or list is a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    if not items:
        yield key, value
    for name, child in items:
        yield from _leaves(child, f"{key}.{name}" if key else str(name))
