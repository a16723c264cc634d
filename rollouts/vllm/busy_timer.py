"""Measure how long at least one of several things was under way, where they may overlap."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class BusyTimer:
    """Add up the time in which at least one thing is under way. The clock, in seconds, may stand still."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds = 0.0  # the sum of the spans that are over
        self._since = 0.0  # when the present span began
        self.running = 0  # things under way

    def begin(self) -> None:
        if self.running == 0:
            self._since = self._clock()
        self.running += 1

    def end(self) -> None:
        assert self.running > 0, "ended more often than begun"
        self.running -= 1
        if self.running == 0:
            self._seconds += self._clock() - self._since

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Count one thing as under way during the block."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def seconds(self) -> float:
        """Return the sum so far, with the span that is under way now."""
        return self._seconds + (self._clock() - self._since if self.running else 0.0)
