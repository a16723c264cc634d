"""What a response meets. Single-turn question answering is the trivial environment, so there is one rollout path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from records.rollout import Prompt


@dataclass(frozen=True)
class Step:
    """What an environment says to a response."""

    done: bool
    messages: list[dict[str, Any]] = field(default_factory=list)  # the observation; the chat template renders it
    token_ids: Sequence[int] | None = None  # the observation as tokens, where the environment makes them itself
    reward: float | None = None  # None: the scoring service decides at the end


class Environment(Protocol):
    """One episode: an object is made per trajectory, with no argument, and used by one task at a time.

    The methods run in the rollout worker's event loop and must not block it.
    """

    def reset(self, prompt: Prompt) -> list[dict[str, Any]]:
        """The messages to begin with."""
        ...

    def step(self, response: str, token_ids: Sequence[int]) -> Step:
        """Take one response (its text, and its tokens as sampled) and say what follows."""
        ...
