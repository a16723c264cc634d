"""The words and numbers of a comparison of methods, from the run directories that benchmarks.compare_methods made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from configs.reading import yaml_text
from eval.curve import SMOOTHING_STEPS
from orchestration.run.console import heldout_accuracy
from orchestration.run.directory import CONFIG, read_metrics

BASELINE = "grpo"

Rows = list[dict[str, float]]  # the lines of metrics.jsonl
Curve = list[tuple[float, float]]  # (step, value)


@dataclass(frozen=True)
class Run:
    """A finished run as its directory holds it."""

    method: str
    seed: int
    config: dict[str, Any]
    rows: Rows

    @property
    def accuracy(self) -> Curve:
        return [(row["step"], found) for row in self.rows if (found := heldout_accuracy(row)) is not None]


def finished(path: Path, method: str, seed: int) -> Run | None:
    """The run in a directory; None unless its last step, by its own config.yaml, has a held-out accuracy."""
    if not (path / CONFIG).is_file():
        return None
    config, _ = yaml_text.parse((path / CONFIG).read_text(encoding="utf-8"), str(path / CONFIG))
    rows = read_metrics(path)
    done = bool(rows) and rows[-1]["step"] == config["train"]["steps"] and heldout_accuracy(rows[-1]) is not None
    return Run(method, seed, config, rows) if done else None


def last_mean(name: str) -> Callable[[Rows], float | None]:
    return lambda rows: mean_of(row.get(name) for row in rows[1:][-SMOOTHING_STEPS:])


def training_seconds(row: dict[str, float]) -> float:
    return row["time/step_seconds"] - row["time/eval_seconds"] - row["time/checkpoint_seconds"]


# Column -> (a run's number from its metrics, format). Step 0, the evaluation before training, is rows[0].
NUMBERS: dict[str, tuple[Callable[[Rows], float | None], str]] = {
    "whole, s": (lambda rows: rows[-1]["time/since_start_seconds"], ".0f"),
    "per step, s": (lambda rows: fmean(training_seconds(row) for row in rows[1:]), ".2f"),
    "responses": (lambda rows: sum(row["rollout/responses"] for row in rows[1:]), ".0f"),
    "reward": (last_mean("reward/mean"), ".3f"),
    "pass rate": (last_mean("reward/pass_rate"), ".3f"),
    "entropy, nats": (last_mean("rollout/entropy_nats"), ".3f"),
    "clip fraction": (lambda rows: mean_of(row.get("method/clip_fraction") for row in rows[1:]), ".4f"),
    "response tokens": (last_mean("rollout/response_tokens"), ".1f"),
    "zero-variance share": (last_mean("rollout/zero_variance_share"), ".2f"),
}


def mean_of(values: Iterable[float | None]) -> float | None:
    """Of those that were logged and are finite; None without any."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(known) if known else None


def by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of each method, the method with the highest mean final accuracy first."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.method, []).append(run)
    return dict(sorted(groups.items(), key=lambda item: (-final_mean(item[1]), item[0])))


def final_mean(runs: Sequence[Run]) -> float:
    return fmean(run.accuracy[-1][1] for run in runs)


def at_half(run: Run) -> float:
    """Held-out accuracy at half of the budget: of the last evaluation not after it."""
    half = run.config["train"]["steps"] / 2
    return [value for step, value in run.accuracy if step <= half][-1]


def report(runs: Sequence[Run], missing: Sequence[str]) -> str:
    """The Markdown text.

    Raises: ValueError when there is no run, or runs differ in their budget or held-out prompts.
    """
    check_comparable(runs)
    groups = by_method(runs)
    train, rollout, prompts = runs[0].config["train"], runs[0].config["rollout"], held_out_prompts(runs[0])
    seeds = sorted({run.seed for run in runs})
    lines = [
        f"# {len(groups)} methods, the same budget",
        "",
        f"{train['steps']} steps of {rollout['prompts_per_step']} prompts x {rollout['responses_per_prompt']} "
        f"responses, {train['updates_per_step']} updates each. One held-out prompt is 1/{prompts} = {1 / prompts:.3f}.",
        *([f"Missing: {', '.join(missing)}."] if missing else []),
        "",
        f"## Held-out {greedily(runs)}accuracy",
        "",
        *accuracy_table(groups, seeds),
        "",
        f"## Difference from {BASELINE} with the same seed",
        "",
        *paired_table(groups, seeds, prompts),
        "",
        "## Cost and behaviour, mean over seeds",
        "",
        *markdown_table(["method", *NUMBERS], numbers_of(groups)),
        "",
        *notes(groups, prompts),
    ]
    return "\n".join(lines) + "\n"


def check_comparable(runs: Sequence[Run]) -> None:
    if not runs:
        raise ValueError("no run is finished; run without --report-only, or give the --out of a comparison")
    for key in ("steps", "updates_per_step"):
        found = sorted({run.config["train"][key] for run in runs})
        if len(found) > 1:
            raise ValueError(f"runs differ in train.{key}: {found}; give --methods and --seeds of one budget")
    if len(asked := sorted({held_out_prompts(run) for run in runs})) > 1:
        raise ValueError(f"runs were judged on different numbers of held-out prompts: {asked}; compare those of one")


def held_out_prompts(run: Run) -> int:
    return round(run.rows[-1]["eval/prompts"])


def greedily(runs: Sequence[Run]) -> str:
    return "greedy " if all("eval/greedy_accuracy" in run.rows[-1] for run in runs) else ""


def accuracy_table(groups: dict[str, list[Run]], seeds: Sequence[int]) -> list[str]:
    rows = []
    for method, runs in groups.items():
        final = {run.seed: run.accuracy[-1][1] for run in runs}
        best = fmean(max(value for _, value in run.accuracy) for run in runs)
        each = [shown(final.get(seed), ".3f") for seed in seeds]
        rows.append([method, f"{final_mean(runs):.3f}", *each, f"{fmean(map(at_half, runs)):.3f}", f"{best:.3f}"])
    return markdown_table(["method", "final", *(f"seed {seed}" for seed in seeds), "at half", "best"], rows)


def paired_table(groups: dict[str, list[Run]], seeds: Sequence[int], prompts: int) -> list[str]:
    """Differences of final accuracies, and their mean in held-out prompts."""
    if BASELINE not in groups:
        return [f"No run of {BASELINE} is there."]
    baseline = {run.seed: run.accuracy[-1][1] for run in groups[BASELINE]}
    rows = []
    for method, runs in groups.items():
        found = {run.seed: run.accuracy[-1][1] - baseline[run.seed] for run in runs if run.seed in baseline}
        mean = mean_of(found.values())
        each = [shown(found.get(seed), "+.3f") for seed in seeds]
        in_prompts = shown(None if mean is None else mean * prompts, "+.1f")
        if method != BASELINE:
            rows.append([method, *each, shown(mean, "+.3f"), in_prompts])
    return markdown_table(["method", *(f"seed {seed}" for seed in seeds), "mean", "in prompts"], rows)


def numbers_of(groups: dict[str, list[Run]]) -> Iterator[list[str]]:
    for method, runs in groups.items():
        means = [(mean_of(number(run.rows) for run in runs), form) for number, form in NUMBERS.values()]
        yield [method, *(shown(mean, form) for mean, form in means)]


def notes(groups: dict[str, list[Run]], prompts: int) -> Iterator[str]:
    """What the numbers are, and where two of them must not be compared."""
    mean = fmean(final_mean(runs) for runs in groups.values())
    yield (
        f"- An accuracy of {mean:.2f} on {prompts} prompts has a standard error of {math.sqrt(mean * (1 - mean) / prompts):.3f}: "
        "differences below that, and within the spread of seeds, say little. All runs answer the same prompts."
    )
    yield "- Best: highest of a run's evaluations, mean over seeds; chosen on the held-out prompts, so it flatters."
    yield "- Whole: wall-clock with start-up, evaluations and checkpoint; per step: without them, mean over steps."
    yield "- Responses: sampled in all for training, refills included. Clip fraction: mean over steps, – where none is logged."
    yield (
        f"- Reward, pass rate, entropy (of the sampled tokens), response tokens and zero-variance share: mean of the last "
        f"{SMOOTHING_STEPS} steps, sampled at the training temperature."
    )
    odd = other_rewards(groups)
    if odd:
        yield f"- {', '.join(odd)}: the reward is made of other parts; compare accuracies and pass rates, not rewards."
    for method, runs in groups.items():
        critic = runs[0].config.get("critic") or {}
        if critic.get("warmup_steps"):
            yield f"- {method}: only the critic learns in the first {critic['warmup_steps']} steps."


def other_rewards(groups: dict[str, list[Run]]) -> list[str]:
    """Methods whose reward has other parts than the baseline's."""
    usual = next(iter(groups.get(BASELINE) or next(iter(groups.values())))).config["reward"]["parts"]
    return [method for method, runs in groups.items() if runs[0].config["reward"]["parts"] != usual]


def shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def markdown_table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    """Padded, so that it reads well in a terminal too; numbers to the right."""
    rows = list(rows)
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(cells: list[str]) -> str:
        padded = [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
        return f"| {' | '.join(padded)} |"

    return [line(head), line(rule), *map(line, rows)]
