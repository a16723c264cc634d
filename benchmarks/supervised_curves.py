"""Curves of a supervised and of a preference run over optimizer steps, as one picture.

    python -m benchmarks.supervised_curves runs/sft runs/dpo --out docs/supervised_curves.svg

Left: loss of the first run, training and held out. Right: loss of the second, and how much further the chosen responses are from
the rejected ones than under the reference (the method's margin), held out.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from orchestration.run.directory import read_metrics

INK, SOFT, ACCENT = "#1f4e79", "#9bb8d3", "#c55a11"


def series(rows: list[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of a metric, where it was logged."""
    found = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in found], [value for _, value in found]


def draw(sft: Path, dpo: Path, out: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "feynrl"  # the same picture has the same bytes
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), constrained_layout=True)
    for axes, run, title in ((left, sft, "SFT"), (right, dpo, "DPO on own pairs")):
        rows = read_metrics(run)
        axes.plot(*series(rows, "train/loss"), color=SOFT, label="loss, training")
        axes.plot(*series(rows, "eval/loss"), color=INK, marker="o", markersize=3, label="loss, held out")
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("optimizer step")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        if margins := series(rows, "eval/method/margin")[1]:
            axes.plot(
                series(rows, "eval/method/margin")[0], margins, color=ACCENT, marker="s", markersize=3,
                label="margin, held out",
            )  # fmt: skip
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(out, format="svg", metadata={"Date": None})
    print(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sft", type=Path, help="run directory of supervised fine-tuning")
    parser.add_argument("dpo", type=Path, help="run directory of preference learning")
    parser.add_argument("--out", type=Path, default=Path("docs/supervised_curves.svg"), help="default: %(default)s")
    options = parser.parse_args()
    draw(options.sft, options.dpo, options.out)


if __name__ == "__main__":
    main()
