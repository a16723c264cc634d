"""Reward responses by the own scorer of their reasoning_gym task."""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Callable
from typing import Any, Literal

import reasoning_gym

from records.rollout import Trajectory
from rewards.last_number import NUMBER


def reasoning_gym_score(
    trajectory: Trajectory, take: Literal["response", "last_line", "last_number"] = "response"
) -> float:
    """Return the task's `score_answer`, between 0 and 1.

    Scorers expect the bare answer. `take` says which part of the response they get: all of it, its last non-empty line,
    or its last number.

    Raises:
        ValueError: the prompt does not come from reasoning_gym.
    """
    columns = trajectory.prompt.columns
    if "reasoning_gym" not in columns:
        raise ValueError(f"prompt {trajectory.prompt.prompt_id} does not come from reasoning_gym; use another reward")
    # Rows from files hold both as Python literals, because JSON would lose tuples, which some scorers compare with.
    params, entry = (ast.literal_eval(x) if isinstance(x, str) else x for x in (columns["params"], columns["entry"]))
    score = _scorer(columns["reasoning_gym"], json.dumps(params, sort_keys=True))
    return float(score(_answer(trajectory.response, take), entry))


def _answer(response: str, take: str) -> str | None:
    """Return the part of the response that is the answer; None, which scorers accept, when there is none."""
    if take == "response":
        return response.strip() or None
    if take == "last_line":
        lines = [line.strip() for line in response.splitlines() if line.strip()]
        return lines[-1] if lines else None
    if take == "last_number":
        numbers = [m["sign"] + m["digits"] for m in NUMBER.finditer(response)]
        return numbers[-1].strip("$\u20ac\u00a3").replace("\u2212", "-").replace(",", "") if numbers else None
    raise ValueError(f"reasoning_gym_score: take is '{take}'; it is one of response, last_line, last_number")


@functools.lru_cache(maxsize=64)
def _scorer(task: str, params: str) -> Callable[[str | None, dict[str, Any]], float]:
    """Return the scorer of a task. It gets the generator's parameters, which some scorers read."""
    return reasoning_gym.create_dataset(task, size=1, seed=0, **json.loads(params)).score_answer
