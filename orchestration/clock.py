"""Where a step's wall-clock goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from orchestration.metrics import time_metrics


class StepClock:
    """Seconds per phase since `restart`; what no phase claims is the driver's own."""

    def __init__(self) -> None:
        self.program_started = psutil.Process().create_time()  # Unix seconds: start-up and imports count
        self.restart()

    def restart(self) -> None:
        """Begin a step."""
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
        self.phases[source] -= seconds
        self.phases[target] = self.phases.get(target, 0.0) + seconds

    def metrics(self) -> dict[str, float]:
        """The time/* metrics of the step so far."""
        return time_metrics(time.monotonic() - self.started, self.phases, time.time() - self.program_started)
