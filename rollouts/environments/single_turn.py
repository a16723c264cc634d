"""Question answering: the environment ends after one response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from records.rollout import Prompt
from rollouts.environment import Step


class SingleTurn:
    """Ask the prompt's messages and end after one response; the scoring service rewards it."""

    def reset(self, prompt: Prompt) -> list[dict[str, Any]]:
        return prompt.messages

    def step(self, response: str, token_ids: Sequence[int]) -> Step:
        return Step(done=True)
