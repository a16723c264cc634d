"""Draw examples from several sources in the wanted shares, each without replacement within its own epoch.

What is drawn depends only on the seed and on how much was drawn before, so a resumed run continues exactly.
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
    """Draw batches from sources. All rows of a source come once before one comes again.

    With mixture `proportional`, all rows of all sources come in one random order, epoch after epoch. With `fixed`, each
    batch holds each source's share to the nearest row; what rounding leaves over is carried to the next batches. With
    `per_step`, the shares of each batch are drawn from a Dirichlet distribution around the weights, as a function of
    (seed, batch number).
    """

    def __init__(
        self, sources: Sequence[ExampleSource], seed: int, mixture: str = PROPORTIONAL, concentration: float = 16.0,
        shuffle: bool = True,
    ) -> None:  # fmt: skip
        assert mixture in (PROPORTIONAL, FIXED, PER_STEP), mixture
        if not sum(len(source) for source in sources):
            raise ValueError("data.sources: the training set is empty; give more rows")
        self.sources, self.seed, self.mixture, self.concentration = list(sources), seed, mixture, concentration
        self._index = {source.name: i for i, source in enumerate(sources)}
        weights = np.asarray([source.source.weight for source in sources], dtype=np.float64)
        self.shares = weights / weights.sum()  # used by fixed and per_step
        self.batches = 0  # batches drawn so far
        self.drawn = np.zeros(len(sources), dtype=np.int64)  # examples drawn so far, per source
        self.tokens = np.zeros(len(sources), dtype=np.int64)  # their tokens
        self._last = np.zeros(len(sources), dtype=np.int64)  # examples in the last batch, per source
        together = mixture == PROPORTIONAL
        self._streams = [Stream(sources, seed, 0, shuffle)] if together else [
            Stream([source], seed, i, shuffle) for i, source in enumerate(sources)
        ]  # fmt: skip

    def next(self, k: int) -> list[Example]:
        """Return the next k examples. Within a batch, the sources come in order.

        Raises:
            ValueError: a source has no usable example at all.
        """
        assert k >= 0
        before = self.drawn.copy()
        batch: list[Example] = []
        for stream, count in zip(self._streams, self._counts(k), strict=True):
            for _ in range(int(count)):
                example = stream.next()
                source = self._index[example[0].prompt.source]
                self.drawn[source] += 1
                self.tokens[source] += sum(len(t.prompt_ids) + len(t.token_ids) for t in example)
                batch.append(example)
        self.batches += 1
        self._last = self.drawn - before
        return batch

    def observe(self, groups: Sequence[Any]) -> None:
        """Do nothing: these mixtures learn nothing from the groups of earlier examples."""

    def metrics(self) -> dict[str, float]:
        """Return each source's share of the last batch, and its examples, tokens, epochs and left-out rows so far."""
        metrics: dict[str, float] = {}
        total = max(1, int(self._last.sum()))
        for i, source in enumerate(self.sources):
            metrics[f"share/{source.name}"] = float(self._last[i]) / total
            metrics[f"examples/{source.name}"] = float(self.drawn[i])
            metrics[f"tokens/{source.name}"] = float(self.tokens[i])
            metrics[f"epoch/{source.name}"] = self._stream_of(i).epochs
            metrics[f"left_out/{source.name}"] = float(source.left_out.bad + source.left_out.too_long)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs, in values that fit into JSON."""
        return {
            "seed": self.seed,
            "mixture": self.mixture,
            "sources": list(self._fingerprints),
            "batches": self.batches,
            "drawn": self.drawn.tolist(),
            "tokens": self.tokens.tolist(),
            "positions": [stream.position for stream in self._streams],
            "unusable": [source.unusable() for source in self.sources],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            ValueError: the state belongs to other data, another mixture or another seed, so the order would silently
                differ.
        """
        for key, now, name in (("seed", self.seed, "run.seed"), ("mixture", self.mixture, "data.mixture")):
            if state[key] != now:
                raise ValueError(
                    f"resume: examples were drawn with {name} {state[key]}, the config says {now}; set it back"
                )
        if state["sources"] != self._fingerprints:
            raise ValueError(
                "resume: the training rows or their weights differ from those of the checkpoint; restore the data block"
            )
        self.batches = int(state["batches"])
        self.drawn = np.asarray(state["drawn"], dtype=np.int64)
        self.tokens = np.asarray(state["tokens"], dtype=np.int64)
        for stream, position in zip(self._streams, state["positions"], strict=True):
            stream.position = int(position)
        for source, unusable in zip(self.sources, state["unusable"], strict=True):
            source.load_unusable(unusable)

    def _counts(self, k: int) -> NDArray[np.int64]:
        """Return how many examples to draw from each stream. They sum to k."""
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

    @functools.cached_property  # the rows do not change, and a state is taken in every step
    def _fingerprints(self) -> list[str]:
        hashes = [hashlib.blake2b(s.row_numbers.tobytes(), digest_size=8).hexdigest() for s in self.sources]
        return [
            f"{s.name} {len(s.rows)} {s.source.weight:g} {row_hash}"
            for s, row_hash in zip(self.sources, hashes, strict=True)
        ]


class Stream:
    """Draw the rows of one or several sources, epoch after epoch. An epoch's order depends on (seed, number, epoch).

    A stream keeps one permutation in memory: 4 bytes per row, 8 above 4 billion rows.
    """

    def __init__(self, sources: Sequence[ExampleSource], seed: int, number: int, shuffle: bool) -> None:
        self.sources, self.seed, self.number, self.shuffle = list(sources), seed, number, shuffle
        self._starts = np.cumsum([0, *(len(source) for source in sources)])
        self.rows = int(self._starts[-1])
        self.position = 0  # rows drawn so far, unusable ones included
        self._order: tuple[int, NDArray[np.unsignedinteger] | None] = (-1, None)
        if not self.rows:
            raise ValueError(
                f"data.sources: '{sources[0].name}' has no row left to learn from; give it more rows, or leave it out"
            )

    @property
    def epochs(self) -> float:
        """Return the number of passes over the rows so far, as a fraction."""
        return self.position / self.rows

    def next(self) -> Example:
        """Return the next usable example.

        Raises:
            ValueError: a whole epoch holds none.
        """
        for _ in range(2 * self.rows):
            row = self._row(self.position)
            self.position += 1
            source = int(np.searchsorted(self._starts, row, side="right")) - 1
            example = self.sources[source].get(row - int(self._starts[source]))
            if example is not None:
                return example
        raise ValueError(
            f"data.sources: a whole epoch of '{self.sources[0].name}' held nothing to learn from; repair its rows, or "
            "leave it out"
        )

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
    """Split k into whole parts: round each quota down, then give one each to those who are owed most beyond that.

    quotas [n] sum to k; owed [n]. Ties go to the first. Return the parts, [n].
    """
    floors = np.floor(quotas + 1e-9).astype(np.int64)
    left = k - int(floors.sum())
    order = np.argsort(-(owed - floors), kind="stable")
    floors[order[:left]] += 1
    return floors
