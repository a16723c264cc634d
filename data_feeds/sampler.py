"""Which prompts are asked next. A sampler is one small object; curricula and mixtures are others like it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from rollouts.records import Group, Prompt


class PromptSampler(Protocol):
    """What the loop asks of a sampler."""

    def next(self, k: int) -> list[Prompt]:
        """The next k prompts."""
        ...

    def observe(self, groups: Sequence[Group]) -> None:
        """What came of prompts asked earlier; difficulty samplers learn from it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, as JSON can hold it."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ShuffledPrompts:
    """Epochs without replacement: each is a permutation that is a pure function of (seed, epoch)."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not prompts:
            raise ValueError("there is no prompt to ask: the training set is empty (data.sources)")
        self.prompts = list(prompts)
        self.seed = seed
        self.asked = 0  # prompts handed out since the run began
        self._order: tuple[int, list[int]] = (-1, [])  # the epoch held and its permutation

    @property
    def epoch(self) -> int:
        """Whole passes over the prompts so far."""
        return self.asked // len(self.prompts)

    def next(self, k: int) -> list[Prompt]:
        """The next k prompts; a batch may span two epochs and then hold a prompt twice."""
        assert k >= 0
        batch = [self._at(position) for position in range(self.asked, self.asked + k)]
        self.asked += k
        return batch

    def observe(self, groups: Sequence[Group]) -> None:
        """The order does not depend on results."""

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked, "seed": self.seed, "prompts": self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises ValueError when it was taken over other prompts or another seed: the order would silently differ.
        """
        if state["seed"] != self.seed:
            raise ValueError(f"resume: prompts were ordered with run.seed {state['seed']}, the config says {self.seed}")
        if state["prompts"] != self._fingerprint():
            raise ValueError("resume: the training prompts differ from those of the checkpoint; restore the data block")
        self.asked = int(state["asked"])

    def _at(self, position: int) -> Prompt:
        epoch, index = divmod(position, len(self.prompts))
        if self._order[0] != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.prompts))
            self._order = (epoch, order.tolist())
        return self.prompts[self._order[1][index]]

    def _fingerprint(self) -> str:
        names = "\n".join(p.prompt_id for p in self.prompts)
        return hashlib.blake2b(names.encode(), digest_size=8).hexdigest()
