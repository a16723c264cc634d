"""The numbers of one step, from its first second to its line in metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from orchestration.engines.utilisation import EngineUtilisation
from orchestration.metrics.step_clock import StepClock
from orchestration.metrics.tally import Tally
from orchestration.run.console import Console
from rollouts.worker import EngineCounters


class StepMetrics:
    """Collect tallies and seconds until `finish` turns them into the step's metrics."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.tally = Tally()
        self.from_checkpoint: dict[str, float] = {}  # numbers of the step that a resumed run has from its checkpoint
        self._clock = StepClock()
        self._engines = EngineUtilisation()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show the phase on the console, and count the block's seconds for it."""
        with self.console.phase(name), self._clock.phase(name):
            yield

    def move_scoring(self, seconds: float) -> None:
        """Count these seconds of generation, or as many as there were, as seconds of scoring."""
        self._clock.move(min(max(0.0, seconds), self._clock.phases["generate"]), "generate", "reward")

    def read_engines(self, counters: Sequence[EngineCounters | None], is_counted: bool = True) -> None:
        """Take in the engines' counters since the last call, or leave them out; see EngineUtilisation."""
        self._engines.take_in(counters, is_counted)

    def so_far(self) -> dict[str, float]:
        """Return the step's numbers so far, without times."""
        return {**self.from_checkpoint, **self.tally.means()}

    def begin_step(self) -> None:
        """Forget everything before: the next step begins now."""
        self.tally, self.from_checkpoint = Tally(), {}
        self._clock.lap()

    def finish(self, overlaps: bool) -> dict[str, float]:
        """Return the step's metrics, and begin the next step."""
        engines, times = self._engines.lap(), self._clock.lap()
        if overlaps:
            self.tally.merge(engines.tally(times["time/step_seconds"]))
        metrics = {**self.so_far(), **times}
        if engines.busy_seconds > 0:
            metrics["rollout/tokens_per_second"] = engines.tokens_generated / engines.busy_seconds
        if "train/tokens" in metrics and times["time/train_seconds"] > 0:
            metrics["train/tokens_per_second"] = metrics["train/tokens"] / times["time/train_seconds"]
        self.tally, self.from_checkpoint = Tally(), {}
        return metrics
