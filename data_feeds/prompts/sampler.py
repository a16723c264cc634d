"""Which prompts are asked next. A sampler is one small object; curricula and mixtures are others like it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from records.rollout import Group, Prompt


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
    """Epochs without replacement: each is a permutation that is a pure function of (seed, epoch).

    With `retire_pass_rate`, a prompt whose last group passed (reward >= pass_threshold) at least that often is passed
    over from then on (ScaleRL, arXiv 2510.13786). When fewer than `prompts_per_step` are left, all come back.
    """

    def __init__(
        self, prompts: Sequence[Prompt], seed: int, retire_pass_rate: float | None = None, pass_threshold: float = 0.5,
        prompts_per_step: int = 1,
    ) -> None:  # fmt: skip
        if not prompts:
            raise ValueError("there is no prompt to ask: the training set is empty (data.sources)")
        assert prompts_per_step >= 1
        self.prompts = list(prompts)
        self.seed = seed
        self.retire_pass_rate, self.pass_threshold = retire_pass_rate, pass_threshold
        self.prompts_per_step = prompts_per_step
        self.position = 0  # places of the epochs' permutations handed out or passed over since the run began
        self.retired: set[str] = set()  # ids of prompts that are passed over
        self._order: tuple[int, list[int]] = (-1, [])  # the epoch held and its permutation

    @property
    def epoch(self) -> int:
        """Whole passes over the prompts so far."""
        return self.position // len(self.prompts)

    def next(self, k: int) -> list[Prompt]:
        """The next k prompts that are not retired; a batch may span two epochs and then hold a prompt twice."""
        assert k >= 0
        batch: list[Prompt] = []
        while len(batch) < k:
            prompt = self._at(self.position)
            self.position += 1
            if prompt.prompt_id not in self.retired:
                batch.append(prompt)
        return batch

    def observe(self, groups: Sequence[Group]) -> None:
        """Retire prompts that pass often enough; groups without a scored response say nothing."""
        if self.retire_pass_rate is None:
            return
        for group in groups:
            passed = [t.reward is not None and t.reward >= self.pass_threshold for t in group.scored]
            if passed and sum(passed) >= self.retire_pass_rate * len(passed):
                self.retired.add(group.prompt.prompt_id)
            elif passed:
                self.retired.discard(group.prompt.prompt_id)
        if len(self.prompts) - len(self.retired) < self.prompts_per_step:
            self.retired.clear()

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "seed": self.seed,
            "prompts": self._fingerprint(),
            "retired": sorted(self.retired),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises ValueError when it was taken over other prompts or another seed: the order would silently differ.
        """
        if state["seed"] != self.seed:
            raise ValueError(f"resume: prompts were ordered with run.seed {state['seed']}, the config says {self.seed}")
        if state["prompts"] != self._fingerprint():
            raise ValueError("resume: the training prompts differ from those of the checkpoint; restore the data block")
        self.position = int(state["position"])
        self.retired = set(state["retired"])

    def _at(self, position: int) -> Prompt:
        epoch, index = divmod(position, len(self.prompts))
        if self._order[0] != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.prompts))
            self._order = (epoch, order.tolist())
        return self.prompts[self._order[1][index]]

    def _fingerprint(self) -> str:
        names = "\n".join(p.prompt_id for p in self.prompts)
        return hashlib.blake2b(names.encode(), digest_size=8).hexdigest()
