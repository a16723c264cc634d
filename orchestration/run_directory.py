"""A run on disk: config.yaml, environment.json, metrics.jsonl, samples/, logs/, checkpoints/, report.html.

Whatever is found under its final name is complete: files are written beside it, flushed to disk and renamed. The
exception is metrics.jsonl, which grows by whole lines; readers leave out a last line that was cut off.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from orchestration.environment import describe_environment
from orchestration.metrics import definition, metric_order
from rollouts.records import IntArray, Trajectory

CONFIG, ENVIRONMENT, METRICS_FILE, REPORT = "config.yaml", "environment.json", "metrics.jsonl", "report.html"
SAMPLES, LOGS, CHECKPOINTS = "samples", "logs", "checkpoints"
FIRST_RANK_SECONDS = 600  # it may be tokenising its data still
RESUME = "resume"  # folder in a checkpoint: what a resumed run needs, see orchestration/resume.py
LOCK = ".lock"
REMOVED_RESUME = ".resume.removing"
MARKER = "checkpoint.json"  # in every finished checkpoint: which run made it, at which step


def check_free(path: str | Path) -> None:
    """Raises: ValueError when `path` already holds a run, or anything else that a run could overwrite."""
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise ValueError(f"run directory {path} is a file; choose another with --run-dir or run.name")
    if path.is_dir() and any(path.iterdir()):
        held = "already holds a run" if (path / CONFIG).exists() or (path / METRICS_FILE).exists() else "is not empty"
        raise ValueError(f"run directory {path} {held}; choose another with --run-dir or run.name, or remove it first")


class RunDirectory:
    """The one writer of a run's files. Make it with `create`, or `opened` one that is there."""

    def __init__(self, path: str | Path, run_id: str) -> None:
        self.path = Path(path)
        self.run_id = run_id
        self.resumed_from: Path | None = None  # the checkpoint that this run goes on from

    @classmethod
    def create(cls, path: str | Path, config_yaml: str, seeds: dict[str, int] | None = None) -> RunDirectory:
        """Make the folder with config.yaml (the resolved configuration) and environment.json.

        Raises: ValueError when the folder already holds a run.
        """
        path = Path(path)
        check_free(path)
        path.mkdir(parents=True, exist_ok=True)
        try:
            with open(path / CONFIG, "x", encoding="utf-8") as file:  # "x": of two runs started at once, one wins
                file.write(config_yaml)
        except FileExistsError:
            check_free(path)
            raise
        for folder in (SAMPLES, LOGS, CHECKPOINTS):
            (path / folder).mkdir()
        run = cls(path, run_id=uuid.uuid4().hex)
        environment = {"run_id": run.run_id, "seeds": seeds or {}, **describe_environment()}
        write_atomically(path / ENVIRONMENT, json.dumps(environment, indent=2) + "\n")
        return run

    @classmethod
    def made_by_first_rank(cls, path: str | Path) -> RunDirectory:
        """The folder that the first rank makes, once it is there: whoever else wrote into it first would be in its way.

        Raises: ValueError when it does not appear.
        """
        path, waited_until = Path(path), time.monotonic() + FIRST_RANK_SECONDS
        while not (path / ENVIRONMENT).is_file():
            if time.monotonic() > waited_until:
                raise ValueError(
                    f"the first rank has not made {path} within {FIRST_RANK_SECONDS} s; is the folder shared?"
                )
            time.sleep(0.1)
        return cls.opened(path)

    @classmethod
    def opened(cls, path: str | Path) -> RunDirectory:
        """A run that is there already. Raises: ValueError when there is none."""
        file = Path(path) / ENVIRONMENT
        if not file.is_file():
            raise ValueError(f"{path} holds no run ({ENVIRONMENT} is missing)")
        return cls(path, run_id=json.loads(file.read_text(encoding="utf-8"))["run_id"])

    def hold(self) -> None:
        """Keep other processes from writing here for the life of this one: ranks may outlive a launcher that was killed.

        Raises: ValueError when another process holds it.
        """
        self._lock = open(self.path / LOCK, "wb")  # noqa: SIM115 the kernel lets go when the process ends
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{self.path} is still being written by a process of this run; end it first") from error

    @property
    def report_path(self) -> Path:
        return self.path / REPORT

    def log_path(self, name: str) -> Path:
        """Where an actor's or library's output goes, e.g. log_path("engine_0")."""
        return self.path / LOGS / f"{name}.log"

    def write_metrics(self, step: int, values: dict[str, float]) -> None:
        """Append one line. Floats keep full precision; values that are not finite become the strings "NaN",
        "Infinity" and "-Infinity".

        Raises: ValueError for a metric without a definition.
        """
        for name in values:
            definition(name)
        ordered = sorted(values, key=metric_order)
        line = json.dumps({"step": step, **{name: _json_number(values[name]) for name in ordered}}, allow_nan=False)
        with open(self.path / METRICS_FILE, "a", encoding="utf-8") as file:
            file.write(line + "\n")  # on closing it is the kernel's: a killed process loses no line

    def write_samples(self, step: int, trajectories: Iterable[Trajectory], heldout: bool = False) -> Path:
        """Write samples/step_000123.jsonl (heldout: eval_000123.jsonl), one line a response."""
        records = [sample_record(trajectory) for trajectory in trajectories]
        path = samples_path(self.path, step, heldout)
        lines = [json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records]
        write_atomically(path, "".join(lines))
        return path

    @contextmanager
    def checkpoint(self, step: int) -> Iterator[Path]:
        """A folder to write a checkpoint into; checkpoints/step_000123 appears, complete, when the block ends.

        After an exception in the block nothing is left.
        Raises: ValueError when that step has a checkpoint.
        """
        final = self.path / CHECKPOINTS / f"step_{step:06d}"
        if final.exists():
            raise ValueError(f"checkpoint {final} exists; remove it first")
        self._remove_leftovers()
        partial = self.partial_checkpoint(step)
        partial.mkdir()
        try:
            yield partial
            (partial / MARKER).write_text(json.dumps({"run_id": self.run_id, "step": step}) + "\n", encoding="utf-8")
            _fsync_tree(partial)
            if (self.path / METRICS_FILE).exists():
                _fsync(self.path / METRICS_FILE)  # even after a power cut, no checkpoint is ahead of its metrics
            os.rename(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _fsync(final.parent)

    def partial_checkpoint(self, step: int) -> Path:
        """Where `checkpoint(step)` has it written, for ranks that write their part of it."""
        return self.path / CHECKPOINTS / f".step_{step:06d}.partial"

    def prune_checkpoints(self, keep: int) -> list[Path]:
        """Remove all but the newest `keep` checkpoints of this run; returns what was removed. Of the others only the newest
        keeps what a resumed run needs: it is several times the size of the weights.

        Folders that this run did not make are left alone.
        """
        assert keep >= 1, f"keep {keep}"
        ours = [path for path in checkpoints(self.path) if read_marker(path)["run_id"] == self.run_id]
        for path in ours[:-keep]:
            doomed = path.with_name(f".{path.name}.removing")  # renamed first: never half a checkpoint under its name
            os.rename(path, doomed)
            shutil.rmtree(doomed)
        for path in ours[-keep:-1] if (ours and (ours[-1] / RESUME).is_dir()) else ():
            if (path / RESUME).is_dir():
                os.rename(path / RESUME, path / REMOVED_RESUME)
                shutil.rmtree(path / REMOVED_RESUME)
        return ours[:-keep]

    def _remove_leftovers(self) -> None:
        """Of a process killed while it wrote or removed a checkpoint."""
        for pattern in (".step_*.partial", ".step_*.removing", f"step_*/{REMOVED_RESUME}"):
            for path in (self.path / CHECKPOINTS).glob(pattern):
                shutil.rmtree(path)


@contextmanager
def not_hiding(error: BaseException) -> Iterator[None]:
    """Inside, something is to be written because of an error. Where the system does not let it, as on a full disk, the error
    that came first gets a note, and is still the one to be raised."""
    try:
        yield
    except OSError as refusal:
        error.add_note(f"and what was to be kept could not be written: {refusal}")


@contextmanager
def afterwards(write: Callable[[], object]) -> Iterator[None]:
    """Calls `write` after the block, also when it ends in an error, which is the one to be raised."""
    try:
        yield
    except BaseException as error:
        with not_hiding(error):
            write()
        raise
    write()


def sample_record(trajectory: Trajectory) -> dict[str, Any]:
    """What samples/ keeps of a response."""
    t = trajectory
    return {
        "group": t.group_id,
        "sample": t.sample,
        "prompt_id": t.prompt.prompt_id,
        "source": t.prompt.source,
        "prompt": prompt_text(t.prompt.messages),
        "messages": [{key: _plain(value) for key, value in message.items()} for message in t.prompt.messages],
        "answer": _plain(t.prompt.answer),
        "response": t.response,
        "reward": None if t.reward is None else _json_number(t.reward),
        "advantage": None if t.advantage is None else _json_number(t.advantage),
        "dropped_by": t.dropped_by,
        "in_baseline": t.in_baseline and t.reward is not None,
        "parts": {name: _json_number(value) for name, value in t.reward_parts.items()},
        "error": t.reward_error,
        "finish_reason": t.finish_reason,
        "prompt_tokens": len(t.prompt_ids),
        "tokens": t.action_tokens,
        "versions": version_runs(t.versions[t.is_action]),
        "generate_seconds": t.generate_seconds,
        "reward_seconds": t.reward_seconds,
    }


def version_runs(versions: IntArray) -> list[list[int]]:
    """[version, tokens] of each run of tokens of one version, in order."""
    runs = np.split(versions, np.flatnonzero(np.diff(versions)) + 1)
    return [[int(run[0]), len(run)] for run in runs if len(run)]


def prompt_text(messages: list[dict[str, Any]]) -> str:
    """Chat messages for people to read: the role on a line of its own, then what was said."""
    return "\n\n".join(f"{message['role']}:\n{_content_text(message['content'])}" for message in messages)


def samples_path(run: str | Path, step: int, heldout: bool = False) -> Path:
    return Path(run) / SAMPLES / f"{'eval' if heldout else 'step'}_{step:06d}.jsonl"


def sample_steps(run: str | Path, heldout: bool = False) -> list[int]:
    """Steps whose samples were written, in order."""
    kind = "eval" if heldout else "step"
    return sorted(int(path.stem.removeprefix(f"{kind}_")) for path in (Path(run) / SAMPLES).glob(f"{kind}_*.jsonl"))


def read_samples(run: str | Path, step: int, heldout: bool = False) -> list[dict[str, Any]]:
    """The records of one samples file, as `sample_record` made them."""
    return [json.loads(line) for line in sample_lines(run, step, heldout)]


def sample_lines(run: str | Path, step: int, heldout: bool = False) -> list[str]:
    """The records of one samples file, not parsed yet."""
    lines = samples_path(run, step, heldout).read_text(encoding="utf-8").split("\n")
    return [line for line in lines if line]


def read_metrics(run: str | Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl, "NaN", "Infinity" and "-Infinity" as floats; empty when there is none yet.

    A null is read as if the metric were absent.
    """
    path = Path(run) / METRICS_FILE
    if not path.exists():
        return []
    complete = path.read_text(encoding="utf-8").split("\n")[:-1]  # what follows the last newline was cut off
    rows = [json.loads(line) for line in complete]
    return [
        {name: float(value) if isinstance(value, str) else value for name, value in row.items() if value is not None}
        for row in rows
    ]


def checkpoints(run: str | Path) -> list[Path]:
    """Complete checkpoints, oldest step first."""
    found = [p for p in (Path(run) / CHECKPOINTS).glob("step_*") if p.is_dir() and (p / MARKER).is_file()]
    return sorted(found, key=lambda path: read_marker(path)["step"])


def read_marker(checkpoint: Path) -> dict[str, Any]:
    """`run_id` and `step` of a finished checkpoint."""
    return json.loads((checkpoint / MARKER).read_text(encoding="utf-8"))


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the new one, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    # A lone surrogate in a model's or data set's text is written as \\udXXX, which JSON reads back as it was.
    with open(partial, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _content_text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if part.get("type") == "text" else f"[{part.get('type')}]" for part in content)


def _json_number(value: float) -> float | int | str:
    if isinstance(value, int):
        return value
    value = float(value)
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")


def _plain(answer: Any) -> Any:
    """An expected answer as JSON holds it; whatever has no form there becomes text."""
    if isinstance(answer, float):
        return _json_number(answer)
    return answer if answer is None or isinstance(answer, str | int) else str(answer)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in files:
            _fsync(Path(folder) / name)
        _fsync(Path(folder))
