"""A sampler decides which prompts come next. It is one small object; a curriculum would be another one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from records.rollout import Group, Prompt


class PromptSampler(Protocol):
    """The interface of a sampler, as the loop uses it."""

    def next(self, k: int) -> list[Prompt]:
        """Return the next k prompts."""
        ...

    def observe(self, groups: Sequence[Group]) -> None:
        """Learn from the groups of earlier prompts, as a sampler by difficulty does."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs, in values that fit into JSON."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ShuffledPrompts:
    """Draw prompts in epochs without replacement. An epoch's order depends on (seed, epoch) alone.

    With `retire_pass_rate`, a prompt is skipped once at least this share of its last group passed (reward >=
    pass_threshold), after ScaleRL, arXiv 2510.13786. When fewer than `prompts_per_step` are left, all come back.
    """

    def __init__(
        self, prompts: Sequence[Prompt], seed: int, retire_pass_rate: float | None = None, pass_threshold: float = 0.5,
        prompts_per_step: int = 1,
    ) -> None:  # fmt: skip
        if not prompts:
            raise ValueError("data.sources: the training set is empty; give more rows")
        assert prompts_per_step >= 1
        self.prompts = list(prompts)
        self.seed = seed
        self.retire_pass_rate, self.pass_threshold = retire_pass_rate, pass_threshold
        self.prompts_per_step = prompts_per_step
        self.position = 0  # places of the epochs' permutations that were drawn or skipped since the run began
        self.retired: set[str] = set()  # ids of the prompts that are skipped
        self._order: tuple[int, list[int]] = (-1, [])  # an epoch and its permutation

    def next(self, k: int) -> list[Prompt]:
        """Return the next k prompts that are not retired. A batch across two epochs may hold a prompt twice."""
        assert k >= 0
        batch: list[Prompt] = []
        while len(batch) < k:
            prompt = self._at(self.position)
            self.position += 1
            if prompt.prompt_id not in self.retired:
                batch.append(prompt)
        return batch

    def observe(self, groups: Sequence[Group]) -> None:
        """Retire prompts whose groups pass often enough, and bring back others. Groups without a score are ignored."""
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
        """Continue where `state` was taken.

        Raises:
            ValueError: the state belongs to other prompts or another seed, so the order would silently differ.
        """
        if state["seed"] != self.seed:
            raise ValueError(
                f"resume: prompts were ordered with run.seed {state['seed']}, the config says {self.seed}; set it back"
            )
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
