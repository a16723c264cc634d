"""The replay buffer keeps groups that were trained on recently, to train on them again as a share of every batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from records.rollout import Group


class ReplayBuffer:
    """Groups that were first trained on at version v may be trained on again at versions up to v + max_age_versions.

    Their records do not change: their tokens keep the behaviour log-probabilities and versions of the sampling.
    Off-policy corrections and staleness therefore see the true age, at most max_staleness + max_age_versions.
    """

    def __init__(self, max_age_versions: int, groups_per_batch: int, seed: int) -> None:
        """Make a buffer from which `take` draws `groups_per_batch` groups, once there are so many."""
        assert max_age_versions >= 0 and groups_per_batch >= 0
        self.max_age_versions, self.groups_per_batch, self.seed = max_age_versions, groups_per_batch, seed
        self._groups: list[tuple[int, Group]] = []  # with the version of the first training, oldest first

    def add(self, groups: Sequence[Group], version: int) -> None:
        """Add groups that are trained on at `version` for the first time, but those that filters left out whole."""
        if self.groups_per_batch:
            self._groups += [(version, group) for group in groups if group.trained]

    def take(self, version: int) -> list[Group]:
        """Return the groups to train on again at `version`: groups_per_batch of them, or all if there are fewer.

        The draw depends only on seed, version and the groups in the buffer, and draws none twice. Groups that are too
        old for `version` leave the buffer.
        """
        self._groups = [(first, group) for first, group in self._groups if version - first <= self.max_age_versions]
        count = min(self.groups_per_batch, len(self._groups))
        places = np.random.default_rng((self.seed, version)).permutation(len(self._groups))[:count]
        return [self._groups[place][1] for place in sorted(places)]

    @property
    def state(self) -> list[tuple[int, Group]]:
        """Return all that a resumed run needs: each group with the version at which it was first trained on."""
        return list(self._groups)

    def load_state(self, state: Sequence[tuple[int, Group]]) -> None:
        """Continue from the `state` of an earlier buffer."""
        self._groups = list(state)
