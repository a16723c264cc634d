"""Draw pictures for pages, as SVG text: how runs learned, and how methods weigh. Equal numbers give equal bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.method_weights import Curve, Curves, Table, alike
from orchestration.run.atomic_files import write_atomically
from orchestration.run.console import heldout_accuracy
from orchestration.run.directory import read_metrics

BLUE, ORANGE, GREY, INK, GRID = "#2f62c0", "#d1641b", "#8c959f", "#1f2328", "#d8dee4"
STYLE: dict[Any, Any] = {  # the keys are a Literal of some 300 names
    "svg.hashsalt": "feynrl",
    "svg.fonttype": "none",
    "path.simplify_threshold": 0.2,
    "figure.facecolor": "white",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "grid.color": GRID,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "xtick.color": INK,
    "ytick.color": INK,
}
SMOOTHING_STEPS = 5  # reward is noisy: it is drawn as the mean of this many neighbouring steps
COLUMNS = 4  # panels side by side in the picture of weights


def styled() -> Any:
    """Return the context in which figures are made, so that all pictures look alike."""
    return matplotlib.rc_context(STYLE)


def svg(figure: Figure) -> str:
    """Return the figure as SVG text, to hundredths of a point and without a date. Call it in the context `styled`."""
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    short = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", text.getvalue())
    short = re.sub(r"font-family: [^;\"]*", "font-family: sans-serif", short)
    return "".join(line.rstrip() + "\n" for line in re.sub(r"\nL ", "L ", short).splitlines())


# ---- how runs learned ----


@dataclass(frozen=True)
class RunCurve:
    """The points of one run: (minutes since the program started, value)."""

    accuracy: list[tuple[float, float]]
    reward: list[tuple[float, float]]
    greedy: bool  # the accuracy is that of one greedy response per prompt


def read_curve(run: str | Path) -> RunCurve:
    """Return the curve of a run directory.

    Raises:
        ValueError: the run has no evaluation and no reward yet.
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
    return RunCurve(accuracy, reward, greedy=any("eval/greedy_accuracy" in row for row in rows))


def write_learning_curves(runs: Sequence[Path], path: Path) -> Path:
    """Draw all runs (seeds of one job) into one SVG file and return its path.

    Raises:
        ValueError: a run has nothing to draw.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, learning_curves([read_curve(run) for run in runs]))
    return path


def learning_curves(curves: Sequence[RunCurve]) -> str:
    """Return the SVG text. Thick, with points: held-out accuracy. Thin: mean reward per step, smoothed."""
    with styled():
        figure = Figure((7.6, 3.8), layout="constrained")
        axes = figure.subplots()
        accuracy_label, reward_label = _accuracy_label(curves), f"mean training reward, mean of {SMOOTHING_STEPS} steps"
        for place, curve in enumerate(curves):
            shown = {} if place else {"accuracy": accuracy_label, "reward": reward_label}
            axes.plot(*_columns(smoothed(curve.reward)), color=ORANGE, linewidth=1.2, label=shown.get("reward"))
            axes.plot(*_columns(curve.accuracy), color=BLUE, marker="o", markersize=4, label=shown.get("accuracy"))
        values = [y for curve in curves for _, y in curve.accuracy + curve.reward]
        axes.set_ylim(min(-0.02, *values), max(1.02, *values))
        axes.set_xlim(left=0)
        axes.set_xlabel("minutes since the program started")
        figure.legend(loc="outside upper left")
        return svg(figure)


def smoothed(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points, each value replaced by the mean of up to SMOOTHING_STEPS values around it."""
    half = SMOOTHING_STEPS // 2
    result = []
    for i, (x, _) in enumerate(points):
        near = [y for _, y in points[max(0, i - half) : i + half + 1]]
        result.append((x, sum(near) / len(near)))
    return result


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _accuracy_label(curves: Sequence[RunCurve]) -> str:
    name = "held-out greedy accuracy" if all(curve.greedy for curve in curves) else "held-out accuracy"
    many = f", {len(curves)} runs" if len(curves) > 1 else ""
    ends = [(curve.accuracy[0][1], curve.accuracy[-1][1]) for curve in curves if curve.accuracy]
    spans = [_span(sorted(values)) for values in zip(*ends, strict=True)]
    return name + many + (f": {spans[0]} before, {spans[1]} after" if spans else "")


def _span(values: list[float]) -> str:
    low, high = f"{values[0]:.2f}", f"{values[-1]:.2f}"
    return low if low == high else f"{low} to {high}"


# ---- how methods weigh ----


def weight_panels(table: Table, curves: Curves) -> str:
    """Return the SVG text: one panel for methods that weigh alike."""
    groups = alike(curves)
    rows = math.ceil(len(groups) / COLUMNS)
    with styled(), matplotlib.rc_context({"font.size": 8, "axes.titlesize": 8.5}):
        figure = Figure((9.4, 2.0 * rows + 0.7), layout="constrained")
        panels: list[Axes] = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
        for axes, group in zip(panels, groups, strict=False):
            axes.set_title(fill(", ".join(group), 30), fontweight="bold")
            _draw_weights(axes, table, curves[group[0]])
        for axes in panels[len(groups) :]:
            axes.remove()
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=3)
        figure.suptitle(table.title, x=0.01, ha="left", fontsize=10)
        return svg(figure)


def _draw_weights(axes: Axes, table: Table, curve: Curve) -> None:
    for values, colour, label in zip(curve, (BLUE, ORANGE), table.labels, strict=True):
        axes.plot(table.points, values, color=colour, label=label)
    if table.is_ratio:
        for sign, label in ((1, "r·A, no clip or cap"), (-1, "_without a label")):
            axes.plot(table.points, [sign * r for r in table.points], color=GREY, lw=0.9, ls=":", label=label, zorder=1)
        axes.set_xscale("log")
        axes.set_ylim(-6.2, 6.2)
    axes.minorticks_off()
    axes.set_xticks(table.ticks, [f"{tick:g}" for tick in table.ticks])
    axes.set_xlim(table.points[0], table.points[-1])
