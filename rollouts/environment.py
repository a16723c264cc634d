"""An environment answers responses. Single-turn question answering is the simplest one: there is one rollout path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from records.rollout import Prompt


@dataclass(frozen=True)
class Step:
    """An environment's answer to a response."""

    done: bool
    messages: list[dict[str, Any]] = field(default_factory=list)  # the observation; the chat template renders it
    token_ids: Sequence[int] | None = None  # the observation as tokens, where the environment makes them itself
    reward: float | None = None  # None: the scoring service decides at the end


class Environment(Protocol):
    """One episode: an object is made per trajectory, with no argument, and used by one task at a time.

    The methods run in the rollout worker's event loop and must not block it.
    """

    def reset(self, prompt: Prompt) -> list[dict[str, Any]]:
        """Return the messages to begin with."""
        ...

    def step(self, response: str, token_ids: Sequence[int]) -> Step:
        """Return what follows a response, which is given as its text and as its tokens as they were sampled."""
        ...
