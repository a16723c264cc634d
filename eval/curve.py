"""The picture of runs for a README: held-out accuracy and reward over wall-clock minutes, as an SVG file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from orchestration.run.atomic_files import write_atomically
from orchestration.run.console import heldout_accuracy
from orchestration.run.directory import read_metrics

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 56, 46
SMOOTHING_STEPS = 5  # reward is noisy: drawn as the mean of this many neighbouring steps

STYLE = """
  text { font: 13px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif; fill: #57606a; }
  .title { font-size: 15px; font-weight: 600; fill: #1f2328; }
  .grid { stroke: #d8dee4; stroke-width: 1; }
  .accuracy { stroke: #2f62c0; fill: #2f62c0; }
  .reward { stroke: #d1641b; fill: #d1641b; }
  path { fill: none !important; stroke-linejoin: round; }
  @media (prefers-color-scheme: dark) {
    text { fill: #9198a1; } .title { fill: #e6edf3; } .grid { stroke: #3d444d; }
    .accuracy { stroke: #7ba4f2; fill: #7ba4f2; } .reward { stroke: #f0a063; fill: #f0a063; }
  }
"""


@dataclass(frozen=True)
class Curve:
    """One run's points: (minutes since the program started, value)."""

    accuracy: list[tuple[float, float]]
    reward: list[tuple[float, float]]
    greedy: bool  # the accuracy is of one greedy response per prompt

    @property
    def minutes(self) -> float:
        return max(x for x, _ in self.accuracy + self.reward)


def read_curve(run: str | Path) -> Curve:
    """The curve of a run directory.

    Raises: ValueError when it has no evaluation and no reward yet.
    """
    accuracy: list[tuple[float, float]] = []
    reward: list[tuple[float, float]] = []
    rows = read_metrics(run)
    for row in rows:
        minutes = row.get("time/since_start_seconds", math.nan) / 60
        for points, value in ((accuracy, heldout_accuracy(row)), (reward, row.get("reward/mean"))):
            if value is not None and math.isfinite(value) and math.isfinite(minutes):
                points.append((minutes, value))
    if not accuracy and not reward:
        raise ValueError(f"{run} has no metrics to draw; give the directory of a run that did a step")
    return Curve(accuracy, reward, greedy=any("eval/greedy_accuracy" in row for row in rows))


def write_curve_svg(runs: list[Path], path: str | Path) -> Path:
    """Draw all runs (seeds of one job) into one SVG file; returns its path.

    Raises: ValueError when a run has nothing to draw.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, curve_svg([read_curve(run) for run in runs]))
    return path


def curve_svg(curves: list[Curve]) -> str:
    """The SVG text. Thick with points: held-out accuracy; thin: mean reward of a step, smoothed."""
    last = max(curve.minutes for curve in curves) or 1.0
    values = [y for curve in curves for _, y in curve.accuracy + curve.reward]
    low, high = min(0.0, *values), max(1.0, *values)

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + x / last * (WIDTH - LEFT - RIGHT)
        up = HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return round(across, 1), round(up, 1)

    body = [*_axes(last, low, high, place)]
    for curve in curves:
        reward = [place(x, y) for x, y in smoothed(curve.reward)]
        accuracy = [place(x, y) for x, y in curve.accuracy]
        body += [_line(reward, "reward", 1.6), _line(accuracy, "accuracy", 2.6)]
        body += [f'<circle class="accuracy" cx="{x}" cy="{y}" r="3.2"/>' for x, y in accuracy]
    body += _legend(curves)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">'
    return "\n".join([head, f"<style>{STYLE}</style>", *body, "</svg>\n"])


def smoothed(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Each value replaced by the mean of up to SMOOTHING_STEPS values around it."""
    half = SMOOTHING_STEPS // 2
    result = []
    for i, (x, _) in enumerate(points):
        near = [y for _, y in points[max(0, i - half) : i + half + 1]]
        result.append((x, sum(near) / len(near)))
    return result


def _axes(last: float, low: float, high: float, place: Callable[[float, float], tuple[float, float]]) -> Iterator[str]:
    for y in _ticks(low, high, 5):
        (x0, y0), (x1, _) = place(0, y), place(last, y)
        yield f'<line class="grid" x1="{x0}" x2="{x1}" y1="{y0}" y2="{y0}"/>'
        yield f'<text x="{x0 - 8}" y="{y0 + 4}" text-anchor="end">{y:g}</text>'
    for x in _ticks(0, last, 8):
        yield f'<text x="{place(x, low)[0]}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{x:g}</text>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">minutes since the program started</text>'


def _legend(curves: list[Curve]) -> list[str]:
    name = "held-out greedy accuracy" if all(curve.greedy for curve in curves) else "held-out accuracy"
    many = f", {len(curves)} runs" if len(curves) > 1 else ""
    ends = sorted(curve.accuracy[-1][1] for curve in curves if curve.accuracy)
    starts = sorted(curve.accuracy[0][1] for curve in curves if curve.accuracy)
    span = ""
    if ends:
        span = f": {_span(starts)} before, {_span(ends)} after"
    return [
        f'<line class="accuracy" x1="{LEFT}" x2="{LEFT + 22}" y1="20" y2="20" stroke-width="2.6"/>',
        f'<text class="title" x="{LEFT + 30}" y="25">{escape(name + many + span)}</text>',
        f'<line class="reward" x1="{LEFT}" x2="{LEFT + 22}" y1="41" y2="41" stroke-width="1.6"/>',
        f'<text x="{LEFT + 30}" y="45">mean training reward, mean of {SMOOTHING_STEPS} steps</text>',
    ]


def _span(values: list[float]) -> str:
    low, high = f"{values[0]:.2f}", f"{values[-1]:.2f}"
    return low if low == high else f"{low} to {high}"


def _line(points: list[tuple[float, float]], name: str, width: float) -> str:
    path = " ".join(f"{'L' if i else 'M'}{x},{y}" for i, (x, y) in enumerate(points))
    return f'<path class="{name}" d="{path}" stroke-width="{width}"/>'


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within [low, high], about `most` of them."""
    raw = (high - low) / most
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    return [round(i * step, 10) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
