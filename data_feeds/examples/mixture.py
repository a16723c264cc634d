"""Which examples come next: several sources in the wanted shares, each without replacement within its own epoch.

What is drawn is a pure function of the seed and of how much was drawn before: a resumed run goes on exactly.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_feeds.examples.examples import Example, ExampleSource

PROPORTIONAL, FIXED, PER_STEP = "proportional", "fixed", "per_step"


class MixedExamples:
    """Draws batches from sources.

    proportional: all rows of all sources in one random order, an epoch after the other. fixed: each batch holds each
    source's share to the nearest row; what rounding leaves over is carried to the next batches. per_step: shares are drawn
    anew for every batch, Dirichlet around the weights, a function of (seed, batch number). A source's rows all come once
    before one comes again.
    """

    def __init__(
        self, sources: Sequence[ExampleSource], seed: int, mixture: str = PROPORTIONAL, concentration: float = 16.0,
        shuffle: bool = True,
    ) -> None:  # fmt: skip
        assert mixture in (PROPORTIONAL, FIXED, PER_STEP), mixture
        if not sum(len(source) for source in sources):
            raise ValueError("there is no example to learn from: the training set is empty (data.sources)")
        self.sources, self.seed, self.mixture, self.concentration = list(sources), seed, mixture, concentration
        self._index = {source.name: i for i, source in enumerate(sources)}
        weights = np.asarray([source.source.weight for source in sources], dtype=np.float64)
        self.shares = weights / weights.sum()  # of fixed and per_step
        self.batches = 0  # drawn so far
        self.drawn = np.zeros(len(sources), dtype=np.int64)  # examples
        self.tokens = np.zeros(len(sources), dtype=np.int64)
        self._last = np.zeros(len(sources), dtype=np.int64)  # examples of the last batch
        together = mixture == PROPORTIONAL
        self._streams = [Stream(sources, seed, 0, shuffle)] if together else [
            Stream([source], seed, i, shuffle) for i, source in enumerate(sources)
        ]  # fmt: skip

    def next(self, k: int) -> list[Example]:
        """The next k examples, sources in order within a batch.

        Raises ValueError when a source has no usable example at all.
        """
        assert k >= 0
        before = self.drawn.copy()
        batch: list[Example] = []
        for stream, count in zip(self._streams, self._counts(k), strict=True):
            for _ in range(int(count)):
                example = stream.next()
                which = self._index[example[0].prompt.source]
                self.drawn[which] += 1
                self.tokens[which] += sum(len(t.prompt_ids) + len(t.token_ids) for t in example)
                batch.append(example)
        self.batches += 1
        self._last = self.drawn - before
        return batch

    def observe(self, groups: Sequence[Any]) -> None:
        """What came of examples drawn earlier; these mixtures learn nothing from it."""

    def metrics(self) -> dict[str, float]:
        """share/<source>: of the last batch; examples, tokens and epochs per source, and rows left out, so far."""
        found: dict[str, float] = {}
        total = max(1, int(self._last.sum()))
        for i, source in enumerate(self.sources):
            found[f"share/{source.name}"] = float(self._last[i]) / total
            found[f"examples/{source.name}"] = float(self.drawn[i])
            found[f"tokens/{source.name}"] = float(self.tokens[i])
            found[f"epoch/{source.name}"] = self._stream_of(i).epochs
            found[f"left_out/{source.name}"] = float(source.left_out.bad + source.left_out.too_long)
        return found

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, as JSON can hold it."""
        return {
            "seed": self.seed,
            "mixture": self.mixture,
            "sources": list(self._fingerprints),
            "batches": self.batches,
            "drawn": self.drawn.tolist(),
            "tokens": self.tokens.tolist(),
            "positions": [stream.position for stream in self._streams],
            "unusable": [source.found() for source in self.sources],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises ValueError when it was taken over other data, another mixture or another seed: the order would silently
        differ.
        """
        for key, now, name in (("seed", self.seed, "run.seed"), ("mixture", self.mixture, "data.mixture")):
            if state[key] != now:
                raise ValueError(f"resume: examples were drawn with {name} {state[key]}, the config says {now}")
        if state["sources"] != self._fingerprints:
            raise ValueError(
                "resume: the training rows or their weights differ from those of the checkpoint; restore the data block"
            )
        self.batches = int(state["batches"])
        self.drawn = np.asarray(state["drawn"], dtype=np.int64)
        self.tokens = np.asarray(state["tokens"], dtype=np.int64)
        for stream, position in zip(self._streams, state["positions"], strict=True):
            stream.position = int(position)
        for source, found in zip(self.sources, state["unusable"], strict=True):
            source.load_found(found)

    def _counts(self, k: int) -> NDArray[np.int64]:
        """Examples to draw from each stream; they sum to k."""
        if self.mixture == PROPORTIONAL:
            return np.asarray([k])
        if self.mixture == FIXED:
            owed = self.shares * (self.drawn.sum() + k) - self.drawn
            return largest_remainder(self.shares * k, k, owed)
        generator = np.random.default_rng([self.seed, self.batches, 1])
        shares = generator.dirichlet(self.concentration * self.shares)
        return largest_remainder(shares * k, k, shares * k)

    def _stream_of(self, source: int) -> Stream:
        return self._streams[0 if self.mixture == PROPORTIONAL else source]

    @functools.cached_property  # the kept rows do not change, and a state is taken every step
    def _fingerprints(self) -> list[str]:
        return [
            f"{s.name} {len(s.rows)} {s.source.weight:g} {hashlib.blake2b(s.kept.tobytes(), digest_size=8).hexdigest()}"
            for s in self.sources
        ]


class Stream:
    """The rows of one or several sources, epoch after epoch; each epoch's order is a function of (seed, number, epoch).

    Holds one permutation: 4 bytes per row, 8 above 4 billion rows.
    """

    def __init__(self, sources: Sequence[ExampleSource], seed: int, number: int, shuffle: bool) -> None:
        self.sources, self.seed, self.number, self.shuffle = list(sources), seed, number, shuffle
        self._starts = np.cumsum([0, *(len(source) for source in sources)])
        self.rows = int(self._starts[-1])
        self.position = 0  # places of the epochs' orders used, unusable rows included
        self._order: tuple[int, NDArray[np.unsignedinteger] | None] = (-1, None)
        if not self.rows:
            raise ValueError(f"data.sources: '{sources[0].name}' has no row left to learn from")

    @property
    def epochs(self) -> float:
        """Passes over the rows so far."""
        return self.position / self.rows

    def next(self) -> Example:
        """The next usable example. Raises ValueError when a whole epoch holds none."""
        for _ in range(2 * self.rows):
            row = self._row(self.position)
            self.position += 1
            which = int(np.searchsorted(self._starts, row, side="right")) - 1
            example = self.sources[which].get(row - int(self._starts[which]))
            if example is not None:
                return example
        raise ValueError(f"data.sources: a whole epoch of '{self.sources[0].name}' held nothing to learn from")

    def _row(self, position: int) -> int:
        epoch, index = divmod(position, self.rows)
        if not self.shuffle:
            return index
        if self._order[0] != epoch:
            order = np.random.default_rng([self.seed, epoch, self.number]).permutation(self.rows)
            self._order = (epoch, order.astype(np.uint32 if self.rows < 2**32 else np.uint64))
        assert self._order[1] is not None
        return int(self._order[1][index])


def largest_remainder(quotas: NDArray[np.float64], k: int, owed: NDArray[np.float64]) -> NDArray[np.int64]:
    """k in whole parts: each quota rounded down, what is left over one each to those who are owed most beyond it.

    quotas [n] sum to k; owed [n]. Ties go to the first.
    """
    floors = np.floor(quotas + 1e-9).astype(np.int64)
    left = k - int(floors.sum())
    order = np.argsort(-(owed - floors), kind="stable")
    floors[order[:left]] += 1
    return floors
