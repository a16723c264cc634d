"""The figure of a comparison of methods: held-out accuracy and reward against the step, one panel a method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import StringIO
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.comparison_report import BASELINE, Curve, Run, by_method, final_mean, greedily, other_rewards
from eval.curve import SMOOTHING_STEPS, smoothed

COLUMNS = 4  # methods side by side
PANEL = (2.75, 1.9)  # inches
BLUE, ORANGE, GREY, INK, GRID = "#2f62c0", "#d1641b", "#8c959f", "#1f2328", "#d8dee4"
STYLE: dict[Any, Any] = {  # the keys are a Literal of some 300 names
    "svg.hashsalt": "compare_methods",  # the same runs give the same bytes
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
}


def draw(runs: Sequence[Run]) -> str:
    """The SVG text, white behind everything. Per method: mean of the seeds as a line, lowest to highest as a band; the
    baseline's mean in grey behind it. Methods stand in the order of the table."""
    groups = by_method(runs)
    accuracy = {method: [run.accuracy for run in found] for method, found in groups.items()}
    reward = {method: [smoothed(rewards(run)) for run in found] for method, found in groups.items()}
    odd = other_rewards(groups)
    columns, blocks = min(COLUMNS, len(groups)), math.ceil(len(groups) / COLUMNS)
    with matplotlib.rc_context(STYLE):
        figure = Figure(
            (PANEL[0] * columns + 0.6, PANEL[1] * 2 * blocks + 0.7), facecolor="white", layout="constrained"
        )
        grid = figure.subplots(2 * blocks, columns, squeeze=False)
        for axes in grid.flat:
            axes.set_visible(False)
        for place, (method, found) in enumerate(groups.items()):
            block, column = divmod(place, columns)
            upper, lower = grid[2 * block, column], grid[2 * block + 1, column]
            for axes in (upper, lower):
                axes.set_visible(True)
            upper.set_title(f"{method} {final_mean(found):.3f}", fontsize=11, fontweight="bold", loc="left")
            panel(upper, accuracy[method], BLUE, accuracy.get(BASELINE) if method != BASELINE else None)
            behind = reward.get(BASELINE) if method != BASELINE and method not in odd else None
            panel(lower, reward[method], ORANGE, behind)
            if method in odd:
                lower.text(0.97, 0.06, "other reward parts", transform=lower.transAxes, ha="right", color=INK)
            upper.tick_params(labelbottom=False)
            lower.set_xlabel("step")
            if column == 0:
                upper.set_ylabel("held-out accuracy")
                lower.set_ylabel("sampled reward")
        for curves, axes in ((accuracy, grid[0::2]), (reward, grid[1::2])):
            limits(list(axes.flat), [curve for several in curves.values() for curve in several])
        figure.suptitle(legend(runs, BASELINE in groups and len(groups) > 1), fontsize=10.5, x=0.01, ha="left")
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return "".join(line.rstrip() + "\n" for line in text.getvalue().splitlines())


def legend(runs: Sequence[Run], grey: bool) -> str:
    seeds = len({run.seed for run in runs})
    lines = f"mean of {seeds} seeds, band from the lowest to the highest" if seeds > 1 else "one seed"
    behind = f" Grey: {BASELINE}." if grey else ""
    return (
        f"Line: {lines}.{behind} Beside the name: final held-out {greedily(runs)}accuracy.\n"
        f"Sampled reward: of the training responses, mean of {SMOOTHING_STEPS} steps."
    )


def rewards(run: Run) -> Curve:
    return [(row["step"], row["reward/mean"]) for row in run.rows if math.isfinite(row.get("reward/mean", math.nan))]


def band(curves: Sequence[Curve]) -> list[tuple[float, float, float, float]]:
    """(step, mean, lowest, highest) over the curves that have a value there."""
    at: dict[float, list[float]] = {}
    for curve in curves:
        for step, value in curve:
            at.setdefault(step, []).append(value)
    return [(step, fmean(values), min(values), max(values)) for step, values in sorted(at.items())]


def panel(axes: Axes, curves: Sequence[Curve], colour: str, behind: Sequence[Curve] | None) -> None:
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    if behind:
        known = band(behind)
        axes.plot([p[0] for p in known], [p[1] for p in known], color=GREY, linewidth=1.6)
    points = band(curves)
    steps, means, low, high = zip(*points, strict=True)
    axes.fill_between(steps, low, high, color=colour, alpha=0.22, linewidth=0)
    axes.plot(steps, means, color=colour, linewidth=2)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))


def limits(several: Sequence[Axes], curves: Sequence[Curve]) -> None:
    """The same scale for all panels of a kind."""
    values = [value for curve in curves for _, value in curve]
    pad = 0.05 * (max(values) - min(values) or 1.0)
    for axes in several:
        axes.set_ylim(min(values) - pad, max(values) + pad)
        axes.set_xlim(0, max(step for curve in curves for step, _ in curve))
