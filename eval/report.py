"""Write report.html of a run: one file that needs nothing else, made from the content of the run directory.

    python -m eval.report runs/grpo                                  write runs/grpo/report.html again
    python -m eval.report runs/a runs/b --curve docs/curve.svg       draw the runs' learning curves

It works during the run too: the file is replaced as a whole.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from configs.reading import yaml_text
from orchestration.metrics.definitions import PHASES, Metric, definition, metric_order
from orchestration.run.atomic_files import write_atomically
from orchestration.run.directory import CONFIG, ENVIRONMENT, REPORT, read_metrics
from orchestration.run.html_page import html_page
from orchestration.run.masking import masked
from orchestration.run.samples import sample_lines, sample_steps

ASSETS = Path(__file__).resolve().parent / "report_assets"
SCRIPTS = ("charts.js", "samples.js", "page.js")

MAX_ROWS = 2000  # steps drawn; more are thinned evenly
FULL_STEPS = 3  # the latest steps whose samples are kept whole
THINNED_STEPS = 40  # earlier steps, evenly spread, of which ...
THINNED_SAMPLES = 16  # ... this many responses are kept
MAX_TEXT = 20_000  # characters of one prompt or response
MAX_SAMPLE_CHARACTERS = 6_000_000  # of all samples together

# The order of curves on the page. Charts named nowhere here come last.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Learning": (
        "Held-out accuracy",
        "Reward",
        "Reward parts",
        "Pass rate",
        "Held-out reward",
        "Accuracy by source",
        "pass@k",
    ),
    "Responses": ("Response length", "Truncated and aborted", "Groups without signal"),
    "Policy": ("Entropy", "KL divergence", "Clip fraction", "Gradient norm", "Learning rate", "Loss", "Method metrics"),
    "Trust": ("Log-probability gap", "Sync probe", "Staleness", "Reward errors"),
    "Speed": ("Tokens per second", "Tokens per step", "Share of other time"),
}


def write_report(run: str | Path) -> Path:
    """Write report.html of a run directory, complete or still growing; return its path.

    Raise ValueError when there is no run in the directory.
    """
    run = Path(run)
    if not (run / CONFIG).is_file():
        raise ValueError(f"{run} holds no run ({CONFIG} is missing); give the directory of a run, such as runs/grpo")
    path = run / REPORT
    write_atomically(path, html_page(run.resolve().name, report_data(run), ASSETS, SCRIPTS))
    return path


class LiveReport:
    """Call `write_report` after every step, unless writing would take more than `share` of the time."""

    def __init__(self, share: float = 0.01) -> None:
        self.share = share
        self.not_before = 0.0

    def __call__(self, run: str | Path) -> Path:
        started = time.monotonic()
        if started < self.not_before:
            return Path(run) / REPORT
        path = write_report(run)
        ended = time.monotonic()
        self.not_before = ended + (ended - started) / self.share
        return path


def report_data(run: Path) -> dict[str, Any]:
    """Return everything that the page shows, as JSON values."""
    config_text = (run / CONFIG).read_text(encoding="utf-8")
    config = yaml.safe_load(config_text) or {}
    shown = masked(config)
    environment = run / ENVIRONMENT
    rows = read_metrics(run)
    names = sorted({name for row in rows for name in row} - {"step"}, key=metric_order)
    definitions = {name: described(name) for name in names}
    drawn = thinned_rows(rows)
    samples, omitted = collect_samples(run)
    if len(drawn) < len(rows):
        omitted.append(f"Curves show {len(drawn)} of {len(rows)} steps; metrics.jsonl has all of them.")
    return {
        "name": run.resolve().name,
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "model": _at(config, "model", "path"),
        "method": _at(config, "algorithm", "name"),
        "total_steps": _at(config, "train", "steps"),
        "pass_threshold": _at(config, "reward", "pass_threshold"),
        "steps": [row["step"] for row in drawn],
        "metrics": {name: [_shown(row.get(name)) for row in drawn] for name in names},
        "definitions": {
            name: {"unit": d.unit, "description": d.description, "chart": d.chart} for name, d in definitions.items()
        },
        "sections": [{"title": title, "charts": charts} for title, charts in SECTIONS.items()],
        "phases": [*PHASES, "other"],
        "seconds": phase_seconds(rows),
        "samples": samples,
        "warnings": warnings(rows),
        "omitted": omitted,
        "config": config_text if shown == config else yaml_text.dump(shown),
        "environment": json.loads(environment.read_text(encoding="utf-8")) if environment.is_file() else {},
    }


def described(name: str) -> Metric:
    """Return a metric's definition, or a placeholder for a name that another version logged."""
    try:
        return definition(name)
    except ValueError:
        return Metric("", "Logged by another version; this one has no definition of it.", "Without a definition")


def phase_seconds(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the seconds of the whole run by phase.

    "start-up" is the time before the first line's step; "other" is all the rest of the wall-clock time that no phase
    claims, between steps as well.
    """
    totals = {phase: sum(seconds for _, seconds in _logged(rows, f"time/{phase}_seconds")) for phase in PHASES}
    clock = [since_start for _, since_start in _logged(rows, "time/since_start_seconds")]
    if not clock:
        return {**totals, "other": sum(seconds for _, seconds in _logged(rows, "time/other_seconds"))}
    first = rows[0].get("time/step_seconds", rows[0].get("time/eval_seconds", 0.0))
    startup = max(0.0, clock[0] - first)
    return {"start-up": startup, **totals, "other": max(0.0, clock[-1] - startup - sum(totals.values()))}


def thinned_rows(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return about MAX_ROWS rows at most: evenly spread ones, every evaluation, the first and the last."""
    if len(rows) <= MAX_ROWS:
        return rows
    spread = set(_spread(len(rows), MAX_ROWS))
    evaluated = [i for i, row in enumerate(rows) if any(name.startswith("eval/") for name in row)]
    spread.update(evaluated[i] for i in _spread(len(evaluated), MAX_ROWS))
    return [rows[i] for i in sorted(spread)]


def collect_samples(run: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the samples to embed, by step, and sentences on what was left out.

    The latest steps are whole; earlier ones are spread evenly and cut to their first responses.
    """
    kept: list[dict[str, Any]] = []
    skipped, room = 0, MAX_SAMPLE_CHARACTERS
    for heldout in (False, True):
        steps = sample_steps(run, heldout)
        full = steps[-FULL_STEPS:]
        earlier = steps[:-FULL_STEPS]
        chosen = full[::-1] + [earlier[i] for i in _spread(len(earlier), THINNED_STEPS)][::-1]
        skipped += len(steps) - len(chosen)
        for step in chosen:
            lines = sample_lines(run, step, heldout)
            shown = [_shortened(json.loads(line)) for line in (lines if step in full else lines[:THINNED_SAMPLES])]
            size = sum(len(record["prompt"]) + len(record["response"]) + 300 for record in shown)
            if size > room:
                skipped += 1
                continue
            room -= size
            kept.append({"step": step, "heldout": heldout, "of": len(lines), "records": shown})
    kept.sort(key=lambda entry: (entry["heldout"], entry["step"]))
    omitted = []
    if any(len(entry["records"]) < entry["of"] for entry in kept):
        omitted.append(f"Of steps before the latest {FULL_STEPS}, the first {THINNED_SAMPLES} responses are shown.")
    if skipped:
        omitted.append(f"The samples of {skipped} steps are not shown; samples/ has all of them.")
    return kept, omitted


def warnings(rows: list[dict[str, float]]) -> list[str]:
    """Return sentences on what a reader must not miss: numbers that are not finite, scoring errors."""
    found = []
    for name in dict.fromkeys(name for row in rows for name in row):
        steps = [row["step"] for row in rows if isinstance(row.get(name), float) and not math.isfinite(row[name])]
        if steps:
            found.append(f"{name} is not finite at {_listed(steps)}.")
    for name, text in (
        ("reward/errors", "responses could not be scored"),
        ("eval/errors", "held-out responses could not be scored"),
    ):
        hit = [(step, count) for step, count in _logged(rows, name) if count > 0]
        if hit:
            found.append(f"{sum(count for _, count in hit):.0f} {text}, at {_listed([step for step, _ in hit])}.")
    return found


def _listed(steps: list[float]) -> str:
    names = ", ".join(f"{step:.0f}" for step in steps[:10])
    more = f" and {len(steps) - 10} more" if len(steps) > 10 else ""
    return f"step {names}{more}" if len(steps) == 1 else f"steps {names}{more}"


def _shortened(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "prompt": _cut(record["prompt"]), "response": _cut(record["response"])}


def _cut(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters not shown ...]\n{text[-half:]}"


def _spread(count: int, most: int) -> list[int]:
    """Return at most `most` of the indices 0..count-1, evenly spread, first and last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def _shown(value: float | None) -> float | str | None:
    """Return six digits, which are enough for a curve; a value that is not finite becomes text."""
    if value is None or math.isfinite(value):
        return None if value is None else float(f"{value:.6g}")
    return str(value)


def _logged(rows: list[dict[str, float]], name: str) -> list[tuple[float, float]]:
    """Return (step, value) for each step at which the metric was logged and is finite."""
    pairs = [(row["step"], row.get(name)) for row in rows]
    return [(step, value) for step, value in pairs if value is not None and math.isfinite(value)]


def _at(config: Any, *keys: str) -> Any:
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.report", description="Write report.html of runs again.")
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, such as runs/grpo")
    parser.add_argument(
        "--curve",
        type=Path,
        metavar="FILE.svg",
        help="draw held-out accuracy and reward of all runs over wall-clock into this file, instead of reports",
    )
    options = parser.parse_args(arguments)
    try:
        if options.curve:
            from eval.pictures import write_learning_curves  # late: matplotlib takes a second to load

            print(write_learning_curves(options.runs, options.curve))
        else:
            for run in options.runs:
                print(write_report(run))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
