"""Write the responses of a step as lines of JSON in the run directory, and read them back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from records.rollout import IntArray, Trajectory

SAMPLES = "samples"  # folder in a run directory


def sample_record(trajectory: Trajectory) -> dict[str, Any]:
    """Return what samples/ keeps of a response."""
    t = trajectory
    return {
        "group": t.group_id,
        "sample": t.sample,
        "prompt_id": t.prompt.prompt_id,
        "source": t.prompt.source,
        "prompt": prompt_text(t.prompt.messages),
        "messages": [{key: _json_value(value) for key, value in message.items()} for message in t.prompt.messages],
        "answer": _json_value(t.prompt.answer),
        "response": t.response,
        "reward": None if t.reward is None else json_number(t.reward),
        "advantage": None if t.advantage is None else json_number(t.advantage),
        "dropped_by": t.dropped_by,
        "in_baseline": t.in_baseline and t.reward is not None,
        "parts": {name: json_number(value) for name, value in t.reward_parts.items()},
        "error": t.reward_error,
        "finish_reason": t.finish_reason,
        "prompt_tokens": len(t.prompt_ids),
        "tokens": t.action_tokens,
        "versions": version_runs(t.versions[t.is_action]),
        "generate_seconds": t.generate_seconds,
        "reward_seconds": t.reward_seconds,
    }


def version_runs(versions: IntArray) -> list[list[int]]:
    """Return [version, number of tokens] of each run of tokens of one version, in order."""
    runs = np.split(versions, np.flatnonzero(np.diff(versions)) + 1)
    return [[int(run[0]), len(run)] for run in runs if len(run)]


def prompt_text(messages: list[dict[str, Any]]) -> str:
    """Format chat messages for people: each role on a line of its own, followed by the content."""
    return "\n\n".join(f"{message['role']}:\n{_content_text(message['content'])}" for message in messages)


def samples_path(run: str | Path, step: int, heldout: bool = False) -> Path:
    return Path(run) / SAMPLES / f"{'eval' if heldout else 'step'}_{step:06d}.jsonl"


def sample_steps(run: str | Path, heldout: bool = False) -> list[int]:
    """Return the steps whose samples were written, in order."""
    kind = "eval" if heldout else "step"
    return sorted(int(path.stem.removeprefix(f"{kind}_")) for path in (Path(run) / SAMPLES).glob(f"{kind}_*.jsonl"))


def read_samples(run: str | Path, step: int, heldout: bool = False) -> list[dict[str, Any]]:
    """Return the records of one samples file, as `sample_record` made them."""
    return [json.loads(line) for line in sample_lines(run, step, heldout)]


def sample_lines(run: str | Path, step: int, heldout: bool = False) -> list[str]:
    """Return the lines of one samples file, not parsed yet."""
    lines = samples_path(run, step, heldout).read_text(encoding="utf-8").split("\n")
    return [line for line in lines if line]


def _content_text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if part.get("type") == "text" else f"[{part.get('type')}]" for part in content)


def _json_value(value: Any) -> Any:
    """Return a value as JSON can hold it; a type that JSON lacks becomes text."""
    if isinstance(value, float):
        return json_number(value)
    return value if value is None or isinstance(value, str | int) else str(value)


def json_number(value: float) -> float | int | str:
    """Return a number as JSON can hold it: a non-finite one becomes "NaN", "Infinity" or "-Infinity"."""
    if isinstance(value, int):
        return value
    value = float(value)
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")
