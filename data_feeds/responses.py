"""Many responses laid end to end, so that numpy works on all their tokens at once: a call for each costs more than the work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from records.rollout import Trajectory

Ints = NDArray[np.int64]


class Responses:
    """The responses of S >= 1 trajectories, laid end to end: F tokens."""

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        lengths = np.asarray([len(t.token_ids) for t in trajectories], dtype=np.int64)
        ends = np.cumsum(lengths)
        self.starts: Ints = ends - lengths  # [S] in the tokens laid end to end
        self.token_ids: Ints = np.concatenate([t.token_ids for t in trajectories]).astype(np.int64)  # [F]
        self.behavior_logprobs = np.concatenate([t.behavior_logprobs for t in trajectories])  # [F]
        self.versions = np.concatenate([t.versions for t in trajectories])  # [F]
        is_action = np.concatenate([t.is_action for t in trajectories])
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_action, dtype=np.int64)])
        self._actions: Ints = np.flatnonzero(is_action)
        self._first: list[int] = before[self.starts].tolist()  # of each trajectory, in _actions
        self._end: list[int] = before[ends].tolist()
        self.counts: Ints = before[ends] - before[self.starts]  # [S] action tokens

    def actions(self, members: Sequence[int]) -> Ints:
        """Places of the action tokens of some trajectories, one after another. [N] in 0..F-1"""
        return np.concatenate([self._actions[self._first[i] : self._end[i]] for i in members])

    def bodies(self) -> list[bytes]:
        """Response tokens that are inputs, as int64: up to the one before the last action token, which is only predicted.

        Empty for a trajectory without action tokens; at least one must have some.
        """
        whole = self.token_ids.tobytes()
        last = self._actions[np.asarray(self._end) - 1]
        return [
            whole[8 * start : 8 * end] if count else b""
            for start, end, count in zip(self.starts.tolist(), last.tolist(), self.counts.tolist(), strict=True)
        ]
