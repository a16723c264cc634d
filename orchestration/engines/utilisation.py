"""How engines spent a step's wall-clock time, from the counters that come with collected groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestration.metrics.tally import Tally
from rollouts.worker import EngineCounters

COUNTERS = ("busy_seconds", "scoring_seconds", "paused_seconds", "tokens_generated")


@dataclass(frozen=True)
class EngineLap:
    """The engines' work since the lap before; seconds are means over engines."""

    busy_seconds: float  # with a response running, and not paused
    scoring_seconds: float  # only scores outstanding
    paused_seconds: float  # weights came, or the trainer had the device
    tokens_generated: float  # by all engines, finished or not

    def tally(self, step_seconds: float) -> Tally:
        """Return busy, paused and idle time. Counters may be a moment old, and the rest comes in the next lap: the
        seconds of one step may exceed its length, or idle ones be below 0, but over a run they add up to its wall-clock
        time. Only the share, which is not summed, is limited to 0..1."""
        tally = Tally()
        tally.total("schedule/engine_busy_seconds", self.busy_seconds)
        tally.total("schedule/engine_paused_seconds", self.paused_seconds)
        tally.total("schedule/engine_idle_seconds", step_seconds - self.busy_seconds - self.paused_seconds)
        tally.add("schedule/engine_busy_share", min(1.0, self.busy_seconds / step_seconds))
        return tally


class EngineUtilisation:
    """Sum up counters that only grow, except that a replaced engine begins at 0 again."""

    def __init__(self) -> None:
        self._before: list[dict[str, float]] = []
        self._sums = dict.fromkeys(COUNTERS, 0.0)

    def take_in(self, counters: Sequence[EngineCounters | None], is_counted: bool = True) -> None:
        """Add what has passed since the last call, or leave it out.

        counters: the last ones of every engine; None for an engine that has not sent any.
        """
        now = [{name: getattr(one, name) if one else 0.0 for name in COUNTERS} for one in counters]
        before, self._before = self._before or [dict.fromkeys(COUNTERS, 0.0) for _ in now], now
        for name in COUNTERS if is_counted else ():
            pairs = [(new[name], old[name]) for new, old in zip(now, before, strict=True)]
            passed = sum(new - old if new >= old else new for new, old in pairs)
            self._sums[name] += passed / len(pairs) if name.endswith("_seconds") else passed

    def lap(self) -> EngineLap:
        """Return the sums since the last lap."""
        sums, self._sums = self._sums, dict.fromkeys(COUNTERS, 0.0)
        return EngineLap(**sums)
