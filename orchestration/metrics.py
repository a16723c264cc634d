"""Every number a run logs: its unit, its definition and how it is reduced.

A `Tally` holds sums, counts, maxima and totals, so that a step's numbers are reduced once over all micro-batches, ranks
and engines: a mean of means weighs a short micro-batch like a long one and is wrong. `METRICS` defines each name;
docs/METRICS.md is generated from it by `python -m orchestration.metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

DOC_PATH = Path(__file__).resolve().parent.parent / "docs" / "METRICS.md"


@dataclass(frozen=True)
class Metric:
    """What a logged number means."""

    unit: str
    description: str
    chart: str  # metrics of the same chart are drawn together in the report


METRICS: dict[str, Metric] = {
    "reward/mean": Metric("reward", "Mean reward of the step's scored responses.", "Reward"),
    "reward/pass_rate": Metric(
        "share", "Share of scored responses whose reward is at least reward.pass_threshold.", "Pass rate"
    ),
    "reward/errors": Metric(
        "responses", "Responses whose scoring raised or ran out of time. They are never a silent 0.", "Reward errors"
    ),
    "reward/error_rate": Metric("share", "reward/errors divided by rollout/responses.", "Reward errors (share)"),
    "rollout/responses": Metric("responses", "Responses sampled in the step.", "Responses"),
    "rollout/response_tokens": Metric("tokens", "Mean generated tokens per response.", "Response length"),
    "rollout/response_tokens_max": Metric("tokens", "Longest response of the step.", "Response length"),
    "rollout/prompt_tokens": Metric("tokens", "Mean prompt tokens per response.", "Prompt length"),
    "rollout/truncated_share": Metric(
        "share", "Share of responses cut at rollout.max_new_tokens.", "Truncated and aborted"
    ),
    "rollout/aborted_share": Metric("share", "Share of responses that an engine gave up.", "Truncated and aborted"),
    "rollout/zero_variance_groups": Metric(
        "groups", "Groups whose scored rewards are all equal: their advantage is 0.", "Groups without signal"
    ),
    "rollout/zero_variance_share": Metric(
        "share", "rollout/zero_variance_groups divided by the step's groups.", "Groups without signal (share)"
    ),
    "rollout/dropped_responses": Metric(
        "responses", "Scored responses that a filter (rollout.filters) left out of the loss.", "Filtered responses"
    ),
    "rollout/dropped_in_baseline": Metric(
        "responses",
        "Those of rollout/dropped_responses that still count in their group's baseline (in_baseline: true).",
        "Filtered responses",
    ),
    "rollout/filtered_groups": Metric(
        "groups", "Groups that filters left out whole, refill rounds included.", "Filtered groups"
    ),
    "rollout/refill_rounds": Metric(
        "rounds", "Rounds of further prompts asked in place of filtered groups.", "Refill rounds"
    ),
    "rollout/refilled_groups": Metric(
        "groups", "Further prompts asked in those rounds; they are in rollout/responses.", "Filtered groups"
    ),
    "rollout/unfilled_groups": Metric(
        "groups", "Groups still missing after rollout.max_refill_rounds: the step trained on fewer.", "Filtered groups"
    ),
    "rollout/retired_prompts": Metric(
        "prompts",
        "Training prompts passed over since they pass often enough (data.retire_pass_rate); it falls to 0 when all come "
        "back.",
        "Retired prompts",
    ),
    "rollout/tokens": Metric("tokens", "Tokens generated in the step by all engines.", "Tokens per step"),
    "rollout/tokens_per_second": Metric(
        "tokens/s", "rollout/tokens divided by time/generate_seconds.", "Tokens per second"
    ),
    "rollout/entropy_nats": Metric(
        "nats",
        "Estimate of the policy's entropy on all generated tokens: the mean of -log mu, as the engine sampled them.",
        "Entropy",
    ),
    "train/loss": Metric(
        "loss", "Aggregated loss of the step's updates, mean over updates. Its size says little; see reward.", "Loss"
    ),
    "train/entropy_nats": Metric(
        "nats",
        "Entropy of the trainer's next-token distribution at the sampling temperature, mean over trained tokens.",
        "Entropy",
    ),
    "train/kl_behavior_nats": Metric(
        "nats",
        "KL(behaviour || trainer), the k3 estimate: mean over trained tokens of rho - 1 - log rho with rho = the "
        "trainer's probability before the step's update divided by the engine's when it sampled. Not below 0.",
        "KL divergence",
    ),
    "train/logprob_gap_mean": Metric(
        "nats",
        "Mean over trained tokens of |trainer's log-probability before the update - engine's when it sampled|.",
        "Log-probability gap",
    ),
    "train/logprob_gap_max": Metric(
        "nats", "Largest |log-probability gap| of a trained token in the step.", "Log-probability gap (largest)"
    ),
    "train/gradient_norm": Metric(
        "norm", "Global L2 norm of the gradient before clipping, mean over the step's updates.", "Gradient norm"
    ),
    "train/learning_rate": Metric("", "Learning rate of the step's last update.", "Learning rate"),
    "train/tokens": Metric(
        "tokens",
        "Tokens put through forward and backward in the step, prompts included, all ranks together.",
        "Tokens per step",
    ),
    "train/action_tokens": Metric("tokens", "Tokens with a loss in the step, all ranks together.", "Tokens per step"),
    "train/tokens_per_second": Metric("tokens/s", "train/tokens divided by time/train_seconds.", "Tokens per second"),
    "train/micro_batches": Metric("micro-batches", "Micro-batches of the step on the busiest rank.", "Micro-batches"),
    "train/trajectories": Metric(
        "responses", "Responses that were trained on: scored, and with an advantage that gives a gradient.", "Responses"
    ),
    "train/empty_updates": Metric(
        "updates", "Updates left out because no response of theirs would have given a gradient.", "Empty updates"
    ),
    "train/skipped_updates": Metric(
        "updates",
        "Updates skipped on all ranks because a reward, advantage, loss or gradient was Inf or NaN; each is kept in replay/.",
        "Skipped updates",
    ),
    "train/staleness_mean": Metric(
        "versions", "Mean over trained tokens of policy versions between sampling and training.", "Staleness"
    ),
    "train/staleness_max": Metric("versions", "Largest staleness of a trained token.", "Staleness"),
    "method/clip_fraction": Metric(
        "share", "Share of trained tokens whose surrogate is clipped: they give no gradient.", "Clip fraction"
    ),
    "method/ratio": Metric(
        "ratio",
        "Mean over trained tokens of new over old probability; exactly 1 when a step makes one update.",
        "Probability ratio",
    ),
    "objective/kl_ref_nats": Metric(
        "nats", "KL to the reference policy by objective.kl.estimator, mean over trained tokens.", "KL divergence"
    ),
    "objective/correction_weight": Metric(
        "ratio", "Mean over trained tokens of the off-policy corrections' factor.", "Off-policy correction"
    ),
    "objective/rejected_share": Metric(
        "share", "Share of trained tokens that an off-policy correction leaves out.", "Off-policy correction"
    ),
    "critic/loss": Metric("", "The critic's loss, aggregated as the policy's.", "Critic loss"),
    "critic/explained_variance": Metric(
        "share",
        "1 - Var(return - value) / Var(return) over the action tokens of an optimizer step, values from its start. 1: the "
        "critic knows the return; 0: as good as a constant; below 0: worse.",
        "Explained variance",
    ),
    "critic/value_mean": Metric("reward", "Mean value over action tokens at the start of the step.", "Value"),
    "critic/gradient_norm": Metric(
        "norm", "Global L2 norm of a separate critic's gradient before clipping.", "Gradient norm"
    ),
    "sync/probe_gap_mean": Metric(
        "nats",
        "Mean |log-probability gap| of engine and trainer on the probe continuations, right after the sync. The run "
        "stops above sync.probe_tolerance.",
        "Sync probe",
    ),
    "sync/probe_gap_max": Metric("nats", "Largest |log-probability gap| of a probe token.", "Sync probe"),
    "time/step_seconds": Metric("s", "Wall-clock of the whole step.", "Seconds per step"),
    "time/data_seconds": Metric(
        "s", "Waiting for the next batch of examples; reading and packing go on beside training.", "Seconds per step"
    ),
    "time/generate_seconds": Metric(
        "s", "From the step's first request until its last response is generated; scoring overlaps.", "Seconds per step"
    ),
    "time/reward_seconds": Metric(
        "s",
        "From the last generated response until the last score: the time in which only scoring was left.",
        "Seconds per step",
    ),
    "time/train_seconds": Metric(
        "s", "Advantages, packing, forward, backward and optimizer, until the last rank is done.", "Seconds per step"
    ),
    "time/sync_seconds": Metric("s", "Sending the new weights and proving them by the probe.", "Seconds per step"),
    "time/eval_seconds": Metric("s", "Held-out evaluation.", "Seconds per step"),
    "time/checkpoint_seconds": Metric("s", "Writing a checkpoint.", "Seconds per step"),
    "time/other_seconds": Metric(
        "s", "time/step_seconds less all of the phases above: the driver's own work.", "Seconds per step"
    ),
    "time/other_share": Metric(
        "share", "time/other_seconds divided by time/step_seconds: wall-clock in no named phase.", "Share of other time"
    ),
    "time/since_start_seconds": Metric(
        "s", "Wall-clock from the start of the program to the end of the step, start-up included.", "Time"
    ),
    "eval/accuracy": Metric(
        "share",
        "Share of held-out responses whose reward is at least reward.pass_threshold. Greedy when eval.temperature is 0. "
        "A response that could not be scored counts as failed.",
        "Held-out accuracy",
    ),
    "eval/greedy_accuracy": Metric(
        "share", "eval/accuracy of one greedy response per held-out prompt.", "Held-out greedy accuracy"
    ),
    "eval/loss": Metric(
        "", "The training objective over all held-out examples, exactly: one sum over one global denominator.", "Loss"
    ),
    "eval/entropy_nats": Metric("nats", "Mean entropy of the model over held-out trained tokens.", "Entropy"),
    "eval/tokens": Metric("tokens", "Tokens of the held-out examples put through the model.", "Held-out prompts"),
    "eval/action_tokens": Metric("tokens", "Held-out tokens with a loss.", "Held-out prompts"),
    "eval/reward": Metric("reward", "Mean reward of the scored held-out responses.", "Reward"),
    "eval/response_tokens": Metric("tokens", "Mean generated tokens per held-out response.", "Response length"),
    "eval/truncated_share": Metric(
        "share", "Share of held-out responses cut at the length limit.", "Truncated and aborted"
    ),
    "eval/errors": Metric("responses", "Held-out responses that could not be scored.", "Reward errors"),
    "eval/prompts": Metric("prompts", "Held-out prompts asked.", "Held-out prompts"),
}

# Names that only a run knows: anything after the prefix is allowed.
PREFIXES: dict[str, Metric] = {
    "reward/": Metric(
        "reward",
        "reward/<part>: mean of one part of the reward over scored responses, before its weight. "
        "reward/pass_rate/<source>: pass rate of one data source.",
        "Reward parts",
    ),
    "rollout/filtered/": Metric(
        "responses", "rollout/filtered/<filter>: scored responses that this filter left out.", "Filtered responses"
    ),
    "method/": Metric(
        "", "method/<name>: a metric that the method's loss returns, mean over trained tokens.", "Method metrics"
    ),
    "eval/accuracy/": Metric(
        "share", "eval/accuracy/<source>: eval/accuracy of one data source.", "Accuracy by source"
    ),
    "eval/method/": Metric(
        "", "eval/method/<name>: a metric that the method's loss returns, over all held-out examples.", "Method metrics"
    ),
    "data/": Metric("", "data/<name>: what the data feed counts; data/share/<source>: share of the batch.", "Data"),
    "eval/pass_at_": Metric(
        "share", "eval/pass_at_<k>: unbiased estimate that at least one of k samples passes.", "pass@k"
    ),
}

# Phases of a step, in the order of the loop; "other" is what they leave.
PHASES = ("data", "generate", "reward", "train", "sync", "eval", "checkpoint")


_ORDER = {name: place for place, name in enumerate(METRICS)}


def definition(name: str) -> Metric:
    """The definition of a metric name.

    Raises: ValueError when the name is neither in METRICS nor under one of PREFIXES.
    """
    if name in METRICS:
        return METRICS[name]
    for prefix in sorted(PREFIXES, key=len, reverse=True):
        if name.startswith(prefix) and len(name) > len(prefix):
            return PREFIXES[prefix]
    raise ValueError(
        f"metric '{name}' has no definition; add it to METRICS in orchestration/metrics.py, or log it under one of "
        f"the free prefixes {', '.join(sorted(PREFIXES))}"
    )


def metric_order(name: str) -> tuple[int, str]:
    """Sorting key: the order of METRICS, then free names by alphabet."""
    return (_ORDER.get(name, len(_ORDER)), name)


def part_metric(part: str) -> str:
    """Metric name of a reward part.

    Raises: ValueError when the part's name is that of another metric.
    """
    name = f"reward/{part}"
    if name in METRICS:
        raise ValueError(f"reward part '{part}' has the name of the metric '{name}'; rename the part")
    return name


@dataclass
class Tally:
    """Sums and counts, maxima and totals by metric name. Merging the tallies of any partition equals the whole."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, sum: float, count: float = 1) -> None:
        """Add to a mean: `sum` of `count` values (or weights)."""
        self._claim(name, self.sums)
        assert count >= 0, f"{name}: count {count}"
        self.sums[name] = self.sums.get(name, 0.0) + float(sum)
        self.counts[name] = self.counts.get(name, 0.0) + float(count)

    def add_values(self, name: str, values: ArrayLike) -> None:
        """Add every element of `values` to a mean; summed in float64."""
        array = np.asarray(values, dtype=np.float64)
        self.add(name, float(array.sum()), array.size)

    def maximum(self, name: str, value: float) -> None:
        """Keep the largest value; NaN stays visible."""
        self._claim(name, self.maxima)
        self.maxima[name] = float(np.maximum(self.maxima.get(name, -np.inf), value))

    def total(self, name: str, value: float) -> None:
        """Add to a plain sum, such as tokens over ranks."""
        self._claim(name, self.totals)
        self.totals[name] = self.totals.get(name, 0.0) + float(value)

    def merge(self, other: Tally) -> Tally:
        """Take in another tally, in place; returns self."""
        for name, value in other.sums.items():
            self.add(name, value, other.counts[name])
        for name, value in other.maxima.items():
            self.maximum(name, value)
        for name, value in other.totals.items():
            self.total(name, value)
        return self

    @classmethod
    def merged(cls, tallies: Iterable[Tally]) -> Tally:
        whole = cls()
        for tally in tallies:
            whole.merge(tally)
        return whole

    def renamed(self, rename: Callable[[str], str]) -> Tally:
        """The same figures under other names, which must have definitions."""
        other = Tally()
        for name, value in self.sums.items():
            other.add(rename(name), value, self.counts[name])
        for name, value in self.maxima.items():
            other.maximum(rename(name), value)
        for name, value in self.totals.items():
            other.total(rename(name), value)
        return other

    def means(self) -> dict[str, float]:
        """One number per name: mean, maximum or total. A mean of nothing (count 0) is left out."""
        means = {name: self.sums[name] / count for name, count in self.counts.items() if count > 0}
        return {**means, **self.maxima, **self.totals}

    def _claim(self, name: str, kind: dict[str, float]) -> None:
        if name not in kind:
            definition(name)
            taken = any(name in other for other in (self.sums, self.maxima, self.totals))
            assert not taken, f"{name} is reduced in two ways"


def time_metrics(step_seconds: float, phases: dict[str, float], since_start_seconds: float) -> dict[str, float]:
    """The time/* metrics of a step from the seconds spent in each of PHASES.

    Raises: ValueError for a phase that is not in PHASES.
    """
    unknown = set(phases) - set(PHASES)
    if unknown:
        raise ValueError(f"unknown phases {sorted(unknown)}; phases are {', '.join(PHASES)}")
    other = step_seconds - sum(phases.values())
    return {
        "time/step_seconds": step_seconds,
        **{f"time/{phase}_seconds": phases.get(phase, 0.0) for phase in PHASES},
        "time/other_seconds": other,
        "time/other_share": other / step_seconds if step_seconds > 0 else 0.0,
        "time/since_start_seconds": since_start_seconds,
    }


def render_docs() -> str:
    """The text of docs/METRICS.md."""
    lines = [
        "# Metrics",
        "",
        "Generated by `python -m orchestration.metrics` from orchestration/metrics.py; do not edit.",
        "",
        "`metrics.jsonl` in a run directory has one line a step: `step` and the metrics below. Step 0 is the evaluation",
        "before training. Means are taken once over everything in the step (all micro-batches, ranks and engines).",
        "A metric that had nothing to be averaged over is absent. Values that are not finite are written as the strings",
        '`"NaN"`, `"Infinity"` and `"-Infinity"`, so that every line is valid JSON and none of them is hidden.',
    ]
    for group in dict.fromkeys(name.split("/")[0] for name in METRICS):
        lines += _table(f"## {group}", {n: m for n, m in METRICS.items() if n.split("/")[0] == group})
    lines += _table("## Names that depend on the run", PREFIXES)
    return "\n".join(lines) + "\n"


def _table(title: str, metrics: dict[str, Metric]) -> list[str]:
    rows = [(name, m.unit, m.description.replace("|", "\\|")) for name, m in metrics.items()]
    return ["", title, "", "| metric | unit | definition |", "|---|---|---|"] + [
        f"| `{name}` | {unit} | {description} |" for name, unit, description in rows
    ]


if __name__ == "__main__":
    DOC_PATH.write_text(render_docs(), encoding="utf-8")
    print(f"wrote {DOC_PATH.name}")
