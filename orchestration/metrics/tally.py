"""Reduce a step's numbers once, over all micro-batches, ranks and engines.

A mean of means would be wrong, because it weighs a short micro-batch like a long one. A `Tally` therefore keeps sums
and counts apart until the end. orchestration/metrics/definitions.py defines each name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from orchestration.metrics.definitions import PHASES, definition


@dataclass
class Tally:
    """Sums and counts, maxima and totals by metric name. Merged tallies of any partition equal that of the whole."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, sum: float, count: float = 1) -> None:
        """Add to a mean: `sum` of `count` values (or weights)."""
        self._claim(name, self.sums)
        assert count >= 0, f"{name}: count {count}"
        self.sums[name] = self.sums.get(name, 0.0) + float(sum)
        self.counts[name] = self.counts.get(name, 0.0) + float(count)

    def add_values(self, name: str, values: ArrayLike) -> None:
        """Add every element of `values` to a mean, summed in float64."""
        array = np.asarray(values, dtype=np.float64)
        self.add(name, float(array.sum()), array.size)

    def maximum(self, name: str, value: float) -> None:
        """Keep the largest value; a NaN stays."""
        self._claim(name, self.maxima)
        self.maxima[name] = float(np.maximum(self.maxima.get(name, -np.inf), value))

    def total(self, name: str, value: float) -> None:
        """Add to a plain sum, such as tokens over ranks."""
        self._claim(name, self.totals)
        self.totals[name] = self.totals.get(name, 0.0) + float(value)

    def merge(self, other: Tally) -> Tally:
        """Add another tally to this one, in place, and return this one."""
        for name, value in other.sums.items():
            self.add(name, value, other.counts[name])
        for name, value in other.maxima.items():
            self.maximum(name, value)
        for name, value in other.totals.items():
            self.total(name, value)
        return self

    @classmethod
    def merged(cls, tallies: Iterable[Tally]) -> Tally:
        whole = cls()
        for tally in tallies:
            whole.merge(tally)
        return whole

    def renamed(self, rename: Callable[[str], str]) -> Tally:
        """Return the same numbers under other names, which must have definitions."""
        other = Tally()
        for name, value in self.sums.items():
            other.add(rename(name), value, self.counts[name])
        for name, value in self.maxima.items():
            other.maximum(rename(name), value)
        for name, value in self.totals.items():
            other.total(rename(name), value)
        return other

    def means(self) -> dict[str, float]:
        """Return one number per name: its mean, maximum or total. A mean of nothing (count 0) is left out."""
        means = {name: self.sums[name] / count for name, count in self.counts.items() if count > 0}
        return {**means, **self.maxima, **self.totals}

    def _claim(self, name: str, kind: dict[str, float]) -> None:
        if name not in kind:
            definition(name)
            taken = any(name in other for other in (self.sums, self.maxima, self.totals))
            assert not taken, f"{name} is reduced in two ways"


def time_metrics(step_seconds: float, phases: dict[str, float], since_start_seconds: float) -> dict[str, float]:
    """Return the time/* metrics of a step from the seconds spent in each of PHASES.

    Raises:
        ValueError: a phase is not in PHASES.
    """
    unknown = set(phases) - set(PHASES)
    if unknown:
        raise ValueError(f"unknown phases {sorted(unknown)}; phases are {', '.join(PHASES)}")
    other = step_seconds - sum(phases.values())
    return {
        "time/step_seconds": step_seconds,
        **{f"time/{phase}_seconds": phases.get(phase, 0.0) for phase in PHASES},
        "time/other_seconds": other,
        "time/other_share": other / step_seconds if step_seconds > 0 else 0.0,
        "time/since_start_seconds": since_start_seconds,
    }
