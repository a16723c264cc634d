"""Reuse of groups (replay): what was trained on a moment ago may be trained on again, as a share of every batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from records.rollout import Group


class ReplayBuffer:
    """Groups first trained on at version v may be trained on again at versions up to v + reuse_versions.

    They are the very records of the first time: behaviour log-probabilities and versions of their tokens are those of the
    sampling, so that off-policy corrections and staleness see their true age, at most max_staleness + reuse_versions.
    """

    def __init__(self, reuse_versions: int, groups_per_batch: int, seed: int) -> None:
        """`groups_per_batch`: how many `take` gives, once there are so many."""
        assert reuse_versions >= 0 and groups_per_batch >= 0
        self.reuse_versions, self.groups_per_batch, self.seed = reuse_versions, groups_per_batch, seed
        self._kept: list[tuple[int, Group]] = []  # version of the first training, oldest first

    def add(self, groups: Sequence[Group], version: int) -> None:
        """Keep groups that are trained on at `version` for the first time; those that filters left out whole are not kept."""
        if self.groups_per_batch:
            self._kept += [(version, group) for group in groups if group.trained]

    def take(self, version: int) -> list[Group]:
        """Groups to train on again at `version`: at most groups_per_batch, none twice, fewer while there are not so many.

        Which ones is a pure function of seed, version and what is kept. Groups too old for `version` are let go.
        """
        self._kept = [(first, group) for first, group in self._kept if version - first <= self.reuse_versions]
        count = min(self.groups_per_batch, len(self._kept))
        drawn = np.random.default_rng((self.seed, version)).permutation(len(self._kept))[:count]
        return [self._kept[place][1] for place in sorted(drawn)]

    @property
    def state(self) -> list[tuple[int, Group]]:
        """All that a resumed run needs: each group kept and the version it was first trained on at."""
        return list(self._kept)

    def load_state(self, state: Sequence[tuple[int, Group]]) -> None:
        """Go on from the `state` of an earlier buffer."""
        self._kept = list(state)
