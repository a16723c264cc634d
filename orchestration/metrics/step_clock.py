"""Measure where a step's wall-clock goes, and decide after which steps something is due."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from orchestration.metrics.tally import time_metrics


class StepClock:
    """Count the seconds of each phase since the last lap. Time in no phase is the driver's own work."""

    def __init__(self) -> None:
        self.program_started = psutil.Process().create_time()  # Unix seconds; start-up and imports count too
        self.started = time.monotonic()
        self.phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's time for a phase."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - started

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count seconds that were measured in one phase for another one."""
        self.phases[source] = self.phases.get(source, 0.0) - seconds
        self.phases[target] = self.phases.get(target, 0.0) + seconds

    def lap(self) -> dict[str, float]:
        """Return the time/* metrics since the last lap, and begin the next one, which includes writing these down."""
        metrics = time_metrics(time.monotonic() - self.started, self.phases, time.time() - self.program_started)
        self.started, self.phases = time.monotonic(), {}
        return metrics


def due(step: int, every: int, steps: int) -> bool:
    """Return whether something is due after this step: after every `every` steps (0: never), and after the last one."""
    return step == steps or (every > 0 and step % every == 0)
