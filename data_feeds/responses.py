"""Many responses laid end to end, so that numpy works on all tokens at once, because one call per response is slow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from records.rollout import Trajectory

Ints = NDArray[np.int64]
# Numbers of every action token, [N] each, by the name of their field in PolicyTokens.
TokenColumns = dict[str, NDArray[Any]]


class Responses:
    """The responses of S trajectories, laid end to end: F tokens, of which N are action tokens."""

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        self.trajectories = trajectories
        lengths = np.asarray([len(t.token_ids) for t in trajectories], dtype=np.int64)
        ends = np.cumsum(lengths)
        self.starts: Ints = ends - lengths  # [S] in 0..F
        self.token_ids: Ints = _joined([t.token_ids for t in trajectories], np.int64)  # [F]
        is_action = _joined([t.is_action for t in trajectories], np.bool_)
        self.actions: Ints = np.flatnonzero(is_action)  # [N] places of the action tokens, in 0..F-1
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_action, dtype=np.int64)])
        self.counts: Ints = before[ends] - before[self.starts]  # [S] action tokens
        self._first: list[int] = before[self.starts].tolist()  # of each trajectory, in `actions`
        self._end: list[int] = before[ends].tolist()
        self._indices = np.arange(len(self.actions), dtype=np.int64)

    def columns(self, version: int, **given: NDArray[Any]) -> TokenColumns:
        """Return what the sampling says of every action token, and the given numbers, one per token or one per
        response.

        version: the policy's version now, from which a token's staleness is counted.
        """
        versions = self._of_actions([t.versions for t in self.trajectories], np.int64)
        assert not len(versions) or version >= versions.max(), "a token is newer than the policy"
        return {
            "behavior_logprobs": self._of_actions([t.behavior_logprobs for t in self.trajectories], np.float32),
            "staleness": version - versions,
            **{name: np.repeat(x, self.counts) if len(x) == len(self.counts) else x for name, x in given.items()},
        }

    def split(self, column: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the part of each trajectory of a column. [N] -> S arrays"""
        return [column[first:end] for first, end in zip(self._first, self._end, strict=True)]

    def order(self, members: Iterable[int]) -> Ints:
        """Return the indices, 0..N-1, of some trajectories' action tokens in a column, one trajectory after another."""
        return np.concatenate([self._indices[self._first[i] : self._end[i]] for i in members])

    def bodies(self) -> list[bytes]:
        """Return the response tokens that are inputs, as int64: up to the one before the last action token, which is
        only predicted. Empty for a trajectory without action tokens; at least one must have some."""
        whole = self.token_ids.tobytes()
        last = self.actions[np.asarray(self._end) - 1]
        return [
            whole[8 * start : 8 * end] if count else b""
            for start, end, count in zip(self.starts.tolist(), last.tolist(), self.counts.tolist(), strict=True)
        ]

    def _of_actions(self, arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
        return _joined(arrays, dtype)[self.actions]


def _joined(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype, casting="unsafe")
