"""Where a step's wall-clock goes, and after which steps something is done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from orchestration.metrics.tally import time_metrics


class StepClock:
    """Seconds per phase since the last lap; what no phase claims is the driver's own."""

    def __init__(self) -> None:
        self.program_started = psutil.Process().create_time()  # Unix seconds: start-up and imports count
        self._restart()

    def _restart(self) -> None:
        self.started = time.monotonic()
        self.phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Claim the block's time for a phase."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - started

    def move(self, seconds: float, source: str, target: str) -> None:
        """Part of what was measured as one phase belongs to another."""
        self.phases[source] = self.phases.get(source, 0.0) - seconds
        self.phases[target] = self.phases.get(target, 0.0) + seconds

    def lap(self) -> dict[str, float]:
        """The time/* metrics since the last lap. The next step begins here: writing this one down belongs to it."""
        metrics = time_metrics(time.monotonic() - self.started, self.phases, time.time() - self.program_started)
        self._restart()
        return metrics


def due(step: int, every: int, steps: int) -> bool:
    """Whether something is done after this step: every so often (0: never), and at the end."""
    return step == steps or (every > 0 and step % every == 0)
