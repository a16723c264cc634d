"""Every number a run logs: its unit, its definition, and the chart it is drawn in. docs/METRICS.md is generated from here."""

from __future__ import annotations

from dataclasses import dataclass


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
        "groups", "Groups that filters left out whole.", "Filtered groups"
    ),
    "rollout/refilled_groups": Metric(
        "groups", "Further prompts asked in place of filtered groups; they are in rollout/responses.", "Filtered groups"
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
    "schedule/spanning_share": Metric(
        "share", "Share of trained responses whose tokens are of more than one policy version.", "Staleness by share"
    ),
    "schedule/reused_share": Metric("share", "Share of the batch's groups that were trained on before.", "Reused groups"),
    "schedule/ready_groups": Metric(
        "groups", "Finished groups that wait for a later batch, when this one was taken.", "Groups under way"
    ),
    "schedule/running_groups": Metric(
        "groups", "Groups asked and not finished when the batch was taken.", "Groups under way"
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
    "schedule/staleness/": Metric(
        "share",
        "schedule/staleness/<n>: share of the trained tokens that are n policy versions older than the policy they train.",
        "Staleness by share",
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
