"""A run directory holds config.yaml, environment.json, metrics.jsonl, samples/, logs/, checkpoints/, resume/, report.html.

A file under its final name is complete: it was written under another name, flushed to disk and renamed. The exception
is metrics.jsonl, which grows by whole lines; readers leave out a last line that was cut off.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from orchestration.metrics.definitions import definition, metric_order
from orchestration.run.atomic_files import fsync_file, fsync_tree, write_atomically
from orchestration.run.checksums import STATES_KEPT, Damaged, checksum, listed, read_marker, sizes, write_marker
from orchestration.run.provenance import describe_provenance
from orchestration.run.samples import SAMPLES, json_number, sample_record, samples_path
from records.rollout import Trajectory

CONFIG, ENVIRONMENT, METRICS_FILE, REPORT = "config.yaml", "environment.json", "metrics.jsonl", "report.html"
LOGS, CHECKPOINTS = "logs", "checkpoints"
CAPTURED_STEPS = "captured_steps"  # folder of the updates that are kept whole for the step debugger
FIRST_RANK_SECONDS = 600  # the first rank may still be tokenising its data
RESUME = "resume"  # folder beside checkpoints/ with what a resumed run needs (orchestration/run/resume.py)
LOCK = ".lock"
# What the system, safetensors, and torch (which cannot write on) say when there is no room.
DISK_FULL = ("No space left on device", "Disk quota exceeded", "inline_container.cc")


def check_free(path: str | Path) -> None:
    """Raise ValueError when `path` already holds a run, or anything else that a run could overwrite."""
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise ValueError(f"run directory {path} is a file; choose another with --run-dir or run.name")
    if path.is_dir() and any(path.iterdir()):
        state = "already holds a run" if (path / CONFIG).exists() or (path / METRICS_FILE).exists() else "is not empty"
        raise ValueError(f"run directory {path} {state}; choose another with --run-dir or run.name, or remove it first")


class RunDirectory:
    """The one writer of a run's files. `create` makes a new run directory, `opened` returns an existing one."""

    def __init__(self, path: str | Path, run_id: str) -> None:
        self.path = Path(path).absolute()  # other processes, which get paths from here, have other current directories
        self.run_id = run_id
        self.resumed_from: Path | None = None  # the checkpoint that this run is resumed from
        self.damaged: dict[Path, str] = {}  # newer checkpoints, and what is wrong with them
        self._lock: BinaryIO | None = None

    @classmethod
    def create(cls, path: str | Path, config_yaml: str, seeds: dict[str, int] | None = None) -> RunDirectory:
        """Make the folder with config.yaml (the resolved configuration) and environment.json.

        Raises:
            ValueError: the folder already holds a run, or other files.
        """
        path = Path(path)
        check_free(path)
        path.mkdir(parents=True, exist_ok=True)
        try:
            with open(path / CONFIG, "x", encoding="utf-8") as file:  # "x": of two runs started at once, only one wins
                file.write(config_yaml)
        except FileExistsError:
            check_free(path)
            raise
        for folder in (SAMPLES, LOGS, CHECKPOINTS):
            (path / folder).mkdir()
        run = cls(path, run_id=uuid.uuid4().hex)
        environment = {"run_id": run.run_id, "seeds": seeds or {}, **describe_provenance()}
        write_atomically(path / ENVIRONMENT, json.dumps(environment, indent=2) + "\n")
        return run

    @classmethod
    def made_by_first_rank(cls, path: str | Path) -> RunDirectory:
        """Wait until the first rank has made the folder, which must be empty for it, and return the run.

        Raises:
            ValueError: the folder does not appear within FIRST_RANK_SECONDS.
        """
        path, deadline = Path(path), time.monotonic() + FIRST_RANK_SECONDS
        while not (path / ENVIRONMENT).is_file():
            if time.monotonic() > deadline:
                raise ValueError(
                    f"the first rank has not made {path} within {FIRST_RANK_SECONDS} s; put the run directory on a "
                    "file system that all machines share, and look into the first rank's output"
                )
            time.sleep(0.1)
        return cls.opened(path)

    @classmethod
    def opened(cls, path: str | Path) -> RunDirectory:
        """Return an existing run.

        Raises:
            ValueError: `path` holds no run, or its environment.json is damaged.
        """
        file = Path(path) / ENVIRONMENT
        if not file.is_file():
            raise ValueError(f"{path} holds no run ({ENVIRONMENT} is missing)")
        try:
            return cls(path, run_id=json.loads(file.read_text(encoding="utf-8"))["run_id"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from error

    def hold(self) -> None:
        """Keep other processes from writing here as long as this one lives.

        Ranks can outlive their launcher, and would go on writing beside a run that was started again.

        Raises:
            ValueError: another process holds the directory.
        """
        self._lock = open(self.path / LOCK, "wb")  # noqa: SIM115 the kernel closes it when the process ends
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{self.path} is still being written by a process of this run; end it first") from error

    @property
    def report_path(self) -> Path:
        return self.path / REPORT

    def log_path(self, name: str) -> Path:
        """Return the file for the output of an actor, e.g. log_path("engine_0")."""
        return self.path / LOGS / f"{name}.log"

    def write_metrics(self, step: int, values: dict[str, float]) -> None:
        """Append one line to metrics.jsonl.

        Floats keep full precision; non-finite values become the strings "NaN", "Infinity" and "-Infinity".

        Raises:
            ValueError: a metric has no definition.
        """
        for name in values:
            definition(name)
        ordered = sorted(values, key=metric_order)
        line = json.dumps({"step": step, **{name: json_number(values[name]) for name in ordered}}, allow_nan=False)
        with open(self.path / METRICS_FILE, "a", encoding="utf-8") as file:
            file.write(line + "\n")  # closing the file hands the line to the kernel: a killed process loses no line

    def write_samples(self, step: int, trajectories: Iterable[Trajectory], heldout: bool = False) -> Path:
        """Write samples/step_000123.jsonl (`heldout`: eval_000123.jsonl), one line per response; return its path."""
        records = [sample_record(trajectory) for trajectory in trajectories]
        path = samples_path(self.path, step, heldout)
        lines = [json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records]
        write_atomically(path, "".join(lines))
        return path

    @contextmanager
    def checkpoint(self, step: int) -> Iterator[Path]:
        """Yield a folder to write a checkpoint into; checkpoints/step_000123 appears, complete, when the block ends.

        After an exception in the block nothing is left.

        Raises:
            ValueError: that step already has a checkpoint.
            OSError: the disk is full. The message says where, and how much the checkpoint takes.
        """
        final = self.path / CHECKPOINTS / f"step_{step:06d}"
        if final.exists():
            raise ValueError(f"checkpoint {final} exists; remove it first")
        self._remove_leftovers()
        partial = self.partial_checkpoint(step)
        partial.mkdir()
        try:
            yield partial
            state, metrics = state_folder(partial), self.path / METRICS_FILE
            marker = {
                "run_id": self.run_id,
                "step": step,
                "files": listed(partial),
                "state": listed(state),
                "metrics": [metrics.stat().st_size, checksum(metrics)] if metrics.exists() else [0, ""],
            }
            write_marker(partial, marker)
            fsync_tree(partial)
            if metrics.exists():
                fsync_file(metrics)  # even after a power cut, no checkpoint is ahead of its metrics
            if state.is_dir():
                fsync_tree(state)
                os.rename(state, state_folder(final))  # first: a state without its checkpoint counts for nothing
                fsync_file(self.path / RESUME)
            os.rename(partial, final)
        except BaseException as error:
            written = folder_bytes(partial) + folder_bytes(state_folder(partial))
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(state_folder(partial), ignore_errors=True)
            if any(words in str(error) for words in DISK_FULL):
                raise self._disk_full(step, written) from error
            raise
        fsync_file(final.parent)

    def partial_checkpoint(self, step: int) -> Path:
        """Return the folder that `checkpoint(step)` yields, for ranks that write their part into it."""
        return self.path / CHECKPOINTS / f".step_{step:06d}.partial"

    def prune_checkpoints(self, keep: int) -> list[Path]:
        """Remove all but the newest `keep` checkpoints of this run, and return the removed ones.

        The state for a resumed run, which is several times the size of the weights, is kept for the newest two that
        have one. Folders that this run did not make are left alone.
        """
        assert keep >= 1, f"keep {keep}"
        ours = self.checkpoints()
        for path in ours[:-keep]:
            _remove(path)
        states = [state for path in ours if (state := state_folder(path)).is_dir()]
        for state in [state for state in states if state not in states[-min(keep, STATES_KEPT) :]]:
            _remove(state)
        return ours[:-keep]

    def checkpoints(self) -> list[Path]:
        """Return the finished checkpoints that this run made, oldest step first."""
        return [path for path in checkpoints(self.path) if read_marker(path)["run_id"] == self.run_id]

    def set_aside_damaged(self) -> list[str]:
        """Rename the damaged checkpoints, so that their steps can be written again; return a sentence for each."""
        said = []
        for path, damage in self.damaged.items():
            aside = next(
                p for n in range(10_000) if not (p := path.with_name(f"{path.name}.damaged{n or ''}")).exists()
            )
            for folder, name in ((state_folder(path), state_folder(aside)), (path, aside)):
                if folder.is_dir():
                    os.rename(folder, name)
            said.append(f"{path} is damaged and was set aside as {aside.name}: {damage}")
        self.damaged = {}
        return said

    def _disk_full(self, step: int, written: int) -> OSError:
        """Return the error that says what is full, how much is needed, and the way out."""
        last = max(self.checkpoints(), key=folder_bytes, default=None)
        needed = folder_bytes(last) + folder_bytes(state_folder(last)) if last is not None else written
        than = "about" if last is not None else "more than"
        return OSError(
            errno.ENOSPC,
            f"the disk of {self.path} is full: the checkpoint of step {step} takes {than} {needed / 2**20:.1f} MiB; make "
            "room there, or lower checkpoint.keep",
        )

    def _remove_leftovers(self) -> None:
        """Remove what a process left that was killed while it wrote or removed a checkpoint."""
        kept = self.path / CHECKPOINTS
        for pattern in (".step_*.partial", ".step_*.removing"):
            for path in kept.glob(pattern):
                shutil.rmtree(path)
        for state in (self.path / RESUME).glob("*"):
            if not (kept / state.name).exists():
                shutil.rmtree(state)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder; 0 when there is none."""
    return sum(sizes(folder).values())


def state_folder(checkpoint: Path) -> Path:
    """Return the folder with what a run needs to go on from a checkpoint, finished or not. It is beside the model."""
    return checkpoint.parent.parent / RESUME / checkpoint.name


def _remove(folder: Path) -> None:
    """Remove a folder. It is renamed first, so that a final name never holds a part."""
    doomed = folder.with_name(f".{folder.name}.removing")
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def read_metrics(run: str | Path) -> list[dict[str, float]]:
    """Return the rows of metrics.jsonl, with "NaN", "Infinity" and "-Infinity" as floats; [] before the first one.

    A null is read as if the metric were absent. Raise ValueError when a line is damaged.
    """
    path = Path(run) / METRICS_FILE
    if not path.exists():
        return []
    lines, damage = whole_lines(path)
    if damage:
        raise ValueError(f"{damage}; --resume keeps a copy of the file and goes on with its whole lines")
    rows = [json.loads(line) for line in lines]
    return [
        {name: float(value) if isinstance(value, str) else value for name, value in row.items() if value is not None}
        for row in rows
    ]


def whole_lines(metrics: Path) -> tuple[list[bytes], str]:
    """Return the lines of a metrics file that can be read, and a sentence about the first that cannot, or ""."""
    lines, damage = [], ""
    complete = metrics.read_bytes().split(b"\n")[:-1]  # what follows the last newline was cut off
    for number, line in enumerate(complete, 1):
        try:
            is_row = isinstance(json.loads(line)["step"], int)
        except (ValueError, TypeError, KeyError):
            is_row = False
        if is_row:
            lines.append(line + b"\n")
        else:
            damage = damage or f"{metrics} is damaged: line {number} is no row of metrics"
    return lines, damage


def checkpoints(run: str | Path) -> list[Path]:
    """Return the finished checkpoints of a run directory, oldest step first; not those whose marker is damaged."""
    by_step = {}
    for path in (Path(run) / CHECKPOINTS).glob("step_*"):
        try:
            marker = read_marker(path)
        except Damaged:
            continue
        if path.name == f"step_{marker['step']:06d}":  # a copy under another name is the user's
            by_step[marker["step"]] = path
    return [by_step[step] for step in sorted(by_step)]
