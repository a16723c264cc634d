"""The console shows a run's progress: one live panel on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TextIO

import rich.console
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

ETA_STEPS = 10  # the remaining time is estimated from this many last steps, evaluations included


class Console:
    """Show the progress of a run of `steps` steps. Use it as a context manager; the panel is gone when the block ends.

        with Console("grpo", steps=50) as console:
            with console.phase("generate"): ...
            console.step(1, metrics)
        console.summary("done", {"report": path})

    It writes to `stream` (None: standard output). A terminal gets the panel, anything else gets plain lines.
    """

    def __init__(self, name: str, steps: int, stream: TextIO | None = None) -> None:
        self.name, self.steps = name, steps
        self._stream = stream or sys.stdout
        self._rich = rich.console.Console(file=self._stream, highlight=False)
        self._live: Live | None = None
        self._start = time.perf_counter()
        self._phase, self._phase_start = "", self._start
        self._done = 0
        self._step_ends: deque[float] = deque(maxlen=ETA_STEPS + 1)
        self._metrics: dict[str, float] = {}
        self._accuracies: list[tuple[int, float]] = []

    def __enter__(self) -> Console:
        if self._stream.isatty() and not self._rich.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._panel,
                console=self._rich,
                refresh_per_second=4,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show that this phase, e.g. "generate", goes on during the block. Phases may be nested."""
        before = self._phase, self._phase_start
        self._phase, self._phase_start = name, time.perf_counter()
        if self._live is None and self._done == 0 and not self._step_ends:
            self._print(f"{name} ...")  # during start-up, plain output would otherwise be silent for long
        try:
            yield
        finally:
            self._phase, self._phase_start = before

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that a step is done. Step 0 is the evaluation before training."""
        self._done = step
        self._step_ends.append(time.perf_counter())
        self._metrics = {**self._metrics, **metrics}
        accuracy = heldout_accuracy(metrics)
        if accuracy is not None:
            self._accuracies.append((step, accuracy))
        if self._live is None:
            self._print(self._plain_line(step, metrics))
        elif accuracy is not None:
            self._print(f"step {step:>{len(str(self.steps))}}  held-out accuracy {accuracy:.3f}")

    def note(self, text: str) -> None:
        """Print a line that stays on the screen."""
        self._print(text)

    def warning(self, text: str) -> None:
        """Print a line that stays on the screen and stands out."""
        self._print(f"warning: {text}", style="yellow")

    def summary(self, title: str, rows: Mapping[str, str | Path]) -> None:
        """Print the last lines of a run: its results, and where they are."""
        self._print("")
        self._print(title, style="bold")
        width = max((len(name) for name in rows), default=0)
        for name, value in rows.items():
            self._print(f"  {name:<{width}}  {value}")

    def remaining_seconds(self) -> float | None:
        """Estimate the remaining time from the last steps; return None before the first one is done."""
        ends = self._step_ends
        if len(ends) < 2:
            return None
        since_last = time.perf_counter() - ends[-1]
        return max(0.0, (self.steps - self._done) * (ends[-1] - ends[0]) / (len(ends) - 1) - since_last)

    def _print(self, text: str, style: str | None = None) -> None:
        self._rich.print(Text(text, style=style or ""), soft_wrap=True)

    def _plain_line(self, step: int, metrics: Mapping[str, float]) -> str:
        parts = [f"step {step}/{self.steps}", *_figures(metrics, heldout_accuracy(metrics))]
        if "time/step_seconds" in metrics:
            parts.append(f"{metrics['time/step_seconds']:.1f} s")
        remaining = self.remaining_seconds()
        if remaining is not None:
            parts.append(f"remaining {clock(remaining)}")
        return "  ".join(parts)

    def _panel(self) -> Panel:
        # The width comes from the terminal itself, because standard output may have been redirected to a log.
        self._rich.width = os.get_terminal_size(self._stream.fileno()).columns or 80  # 0 means unknown
        now = time.perf_counter()
        figures = _figures(self._metrics, None)
        if self._accuracies:
            step, accuracy = self._accuracies[-1]
            figures.insert(1, f"held-out {accuracy:.3f} (step {step})")
        phase = f"{self._phase} {clock(now - self._phase_start)}" if self._phase else "between phases"
        remaining = self.remaining_seconds()
        times = f"elapsed {clock(now - self._start)}   remaining {'?' if remaining is None else clock(remaining)}"
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        grid.add_column(justify="right", no_wrap=True)
        grid.add_row(ProgressBar(total=self.steps, completed=self._done), f"step {self._done}/{self.steps} done")
        grid.add_row(Text(phase, style="bold"), Text(times, style="dim"))
        last_line = Text("  ".join(figures) or "no step done yet", no_wrap=True, overflow="ellipsis")
        return Panel(Group(grid, last_line), title=self.name, title_align="left", border_style="dim", padding=(0, 1))


def heldout_accuracy(metrics: Mapping[str, float]) -> float | None:
    """Return the step's held-out accuracy, the greedy one if it was measured; None without an evaluation."""
    return metrics.get("eval/greedy_accuracy", metrics.get("eval/accuracy"))


def clock(seconds: float) -> str:
    """Format a duration as m:ss, or as h:mm:ss from one hour on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _figures(metrics: Mapping[str, float], accuracy: float | None) -> list[str]:
    figures = []
    if "reward/mean" in metrics:
        figures.append(f"reward {metrics['reward/mean']:.3f}")
    elif "train/loss" in metrics and "rollout/responses" not in metrics:  # in RL the size of the loss says little
        figures.append(f"loss {metrics['train/loss']:.4f}")
    if metrics.get("reward/errors"):
        figures.append(f"reward errors {metrics['reward/errors']:.0f} of {metrics['rollout/responses']:.0f}")
    if metrics.get("eval/errors"):
        figures.append(f"held-out reward errors {metrics['eval/errors']:.0f}")
    if "eval/loss" in metrics:
        figures.append(f"held-out loss {metrics['eval/loss']:.4f}")
    if accuracy is not None:
        figures.append(f"held-out {accuracy:.3f}")
    if "rollout/response_tokens" in metrics:
        figures.append(f"response {metrics['rollout/response_tokens']:.1f} tokens")
    elif "train/tokens_per_second" in metrics:
        figures.append(f"{metrics['train/tokens_per_second']:,.0f} tokens/s")
    if "rollout/tokens_per_second" in metrics:
        figures.append(f"{metrics['rollout/tokens_per_second']:,.0f} tokens/s")
    return figures
