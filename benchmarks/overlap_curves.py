"""Reward against wall-clock of the runs of benchmarks/overlap.py, sync and overlap, every seed: python -m benchmarks.overlap_curves

Evaluations, checkpoints and start-up are left out of the clock on both sides.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from pathlib import Path

from benchmarks.overlap import SMOOTHED_STEPS, step_seconds
from orchestration.run.directory import read_metrics

COLOURS = {"sync": "#9bb8d3", "overlap": "#1f4e79"}


def curve(run: Path) -> tuple[list[float], list[float]]:
    """Seconds of training at the end of every step, and the mean reward of the last steps."""
    rows = [row for row in read_metrics(run) if row["step"] > 0]
    rewards = [row["reward/mean"] for row in rows]
    smooth = [statistics.fmean(rewards[max(0, i - SMOOTHED_STEPS + 1) : i + 1]) for i in range(len(rows))]
    return list(itertools.accumulate(map(step_seconds, rows))), smooth


def draw(runs: Path, target: float, out: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "feynrl"  # the same picture has the same bytes
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2), constrained_layout=True)
    for kind, colour in COLOURS.items():
        for number, run in enumerate(sorted(runs.glob(f"{kind}_seed*"))):
            axes.plot(*curve(run), color=colour, linewidth=1.3, label=None if number else kind)
    axes.axhline(target, color="#c55a11", linewidth=0.7, linestyle=":")
    axes.set_xlabel("seconds of training")
    axes.set_title(f"mean reward of {SMOOTHED_STEPS} steps, a core for each side", loc="left", fontsize=10)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(out, format="svg", metadata={"Date": None})
    print(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/overlap"), help="folder (default: %(default)s)")
    parser.add_argument("--target", type=float, default=0.7, help="the dotted line (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("docs/overlap_curves.svg"), help="default: %(default)s")
    options = parser.parse_args()
    draw(options.runs, options.target, options.out)


if __name__ == "__main__":
    main()
