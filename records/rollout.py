"""The records of all rooms: a prompt, one sampled response (trajectory), and all responses to a prompt (group).

Only token ids are passed on: text is decoded for rewards and people, never tokenised again. This file imports numpy
only, so that reward processes start quickly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class Prompt:
    """One row of a data set, ready to be sent to an engine."""

    prompt_id: str  # unique and stable over runs: source name and row
    messages: list[dict[str, Any]]  # chat messages, system prompt included
    answer: Any = None  # what a reward compares with
    source: str = ""  # which entry of data.sources it came from
    columns: dict[str, Any] = field(default_factory=dict)  # the row's other columns, passed through to rewards
    images: tuple[Any, ...] = ()  # for vision-language models


@dataclass
class Trajectory:
    """One sampled response, possibly of several turns. Arrays of T tokens generated or observed after the prompt."""

    prompt: Prompt
    group_id: str  # all responses to one asking of a prompt share it
    sample: int  # index within the group
    prompt_ids: IntArray  # [P]
    token_ids: IntArray  # [T]
    behavior_logprobs: FloatArray  # [T] exactly as sampled; 0 on observations
    versions: IntArray  # [T] policy version that made each token
    is_action: BoolArray  # [T] trained on (generated) or not (observed)
    turn: IntArray  # [T]
    response: str = ""  # decoded action tokens, special tokens removed
    finish_reason: str = ""  # "stop" ended by itself, "length" cut at the limit, "abort"
    reward: float | None = None  # None until scored, and for good when scoring failed; may be Inf or NaN
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward_error: str | None = None  # why scoring failed: never a silent 0
    dropped_by: str | None = None  # the filter that left it out of the loss
    in_baseline: bool = True  # whether its reward counts in its group's baseline, dropped or not
    advantage: float | None = None  # set when it is trained on
    chosen: bool | None = None  # preference data: the preferred response of its pair, or a desirable one
    generate_seconds: float = 0.0
    reward_seconds: float = 0.0

    def __post_init__(self) -> None:
        lengths = {
            name: len(getattr(self, name))
            for name in ("token_ids", "behavior_logprobs", "versions", "is_action", "turn")
        }
        if len(set(lengths.values())) > 1:
            raise ValueError(f"trajectory {self.group_id}/{self.sample}: per-token arrays differ in length: {lengths}")

    @classmethod
    def example(cls, prompt: Prompt, response: str, tokens: int = 3) -> Trajectory:
        """Return a response that ended by itself, with made-up tokens, to try a reward on."""
        ids = np.zeros(tokens, np.int32)
        is_action, logprobs = np.ones(tokens, np.bool_), np.zeros(tokens, np.float32)
        return cls(
            prompt, "example", 0, ids, ids, logprobs, ids, is_action, ids, response=response, finish_reason="stop"
        )

    @property
    def action_tokens(self) -> int:
        return int(self.is_action.sum())

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    def with_a_state_after(self) -> Trajectory:
        """Return the trajectory with one more action token, whose state is the one after the last real token. It does
        not matter which token is added, because it is only predicted and never an input."""

        def longer(array: np.ndarray, value: float) -> np.ndarray:
            return np.append(array, np.asarray(value, dtype=array.dtype))

        return replace(
            self,
            token_ids=longer(self.token_ids, 0),
            behavior_logprobs=longer(self.behavior_logprobs, 0),
            versions=longer(self.versions, self.versions[-1]),
            is_action=longer(self.is_action, True),
            turn=longer(self.turn, self.turn[-1]),
        )


@dataclass
class Group:
    """All trajectories of one request for a prompt; sizes may differ between groups."""

    group_id: str
    prompt: Prompt
    trajectories: list[Trajectory]

    @property
    def scored(self) -> list[Trajectory]:
        """Return the trajectories with a reward."""
        return [t for t in self.trajectories if t.reward is not None]

    @property
    def baseline(self) -> list[Trajectory]:
        """Return the trajectories that the advantage is computed from: scored, and not removed by a filter."""
        return [t for t in self.scored if t.in_baseline]

    @property
    def trained(self) -> list[Trajectory]:
        """Return the trajectories that are in the loss: those in the baseline that no filter left out."""
        return [t for t in self.baseline if t.dropped_by is None]


def paid_alike(trajectories: Iterable[Trajectory], tolerance: float = 1e-6) -> bool:
    """Return whether all rewards lie within `tolerance`: such a group has no advantage. It is true for one response,
    and never for a reward that is Inf or NaN."""
    rewards = [t.reward for t in trajectories if t.reward is not None]
    if not all(math.isfinite(r) for r in rewards):
        return False
    return not rewards or max(rewards) - min(rewards) <= tolerance
