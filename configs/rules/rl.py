"""Rules that span keys of a reinforcement learning job.

A problem refuses a configuration; it is (dotted key, message with the remedy). A warning lets it run and says what the
user should know. Each function yields all that it finds, so that one message lists them.
"""

from __future__ import annotations

from collections.abc import Iterator

from configs.blocks.rl import RLConfig
from configs.rules.evaluation import reward_problems, reward_warnings
from configs.rules.lora import lora_problems, lora_warnings
from configs.rules.objective import objective_problems, objective_warnings
from configs.rules.passed_through import deepspeed_problems, engine_length_problems, engine_problems
from configs.rules.placement import placement_problems
from configs.rules.problem import Problem
from configs.rules.schedule import schedule_problems, schedule_warnings

MANY_STEPS = 200  # more than one would do again without being asked
UNSYNCED_GAP_NATS = 0.4  # mean gap seen when an engine kept its old weights
BFLOAT16_GAP_NATS = 0.04  # mean gap of healthy bfloat16 engines


def rl_problems(config: RLConfig) -> Iterator[Problem]:
    """Yield what is wrong with the job."""
    yield from _batch(config)
    yield from _schedule(config)
    yield from _lengths(config)
    yield from objective_problems(config)
    yield from schedule_problems(config)
    yield from placement_problems(config)
    yield from lora_problems(config.lora, config.checkpoint.merged)
    yield from reward_problems(config.reward)
    yield from deepspeed_problems(config.train)
    yield from engine_problems("rollout.engine", config.rollout.engine)
    if config.eval.temperature == 0 and config.eval.samples_per_prompt > 1:
        yield (
            "eval.samples_per_prompt",
            f"{config.eval.samples_per_prompt} greedy responses to one prompt are all the same; "
            "use 1, or an eval.temperature above 0",
        )


def _batch(config: RLConfig) -> Iterator[Problem]:
    prompts, updates = config.rollout.prompts_per_step, config.train.updates_per_step
    if prompts % updates:
        divisors = [n for n in range(1, prompts + 1) if prompts % n == 0]
        near_updates = _around(updates, divisors)
        near_prompts = _around(prompts, [updates * (prompts // updates), updates * (prompts // updates + 1)])
        yield (
            "rollout.prompts_per_step",
            f"{prompts} prompts do not split evenly into {updates} optimizer steps; use train.updates_per_step "
            f"{near_updates}, or rollout.prompts_per_step {near_prompts}",
        )
        return
    sequences = prompts // updates * config.rollout.responses_per_prompt
    if sequences < config.train.ranks:
        yield (
            "train.ranks",
            f"an optimizer step has {sequences} responses for {config.train.ranks} ranks; use at most {sequences} "
            "ranks, or raise rollout.prompts_per_step or rollout.responses_per_prompt",
        )


def _around(value: int, allowed: list[int]) -> str:
    """Return the allowed values next below and above, as text."""
    below = [n for n in allowed if 0 < n < value][-1:]
    return " or ".join(str(n) for n in below + [n for n in allowed if n > value][:1])


def _schedule(config: RLConfig) -> Iterator[Problem]:
    train = config.train
    if train.min_learning_rate > train.learning_rate:
        yield (
            "train.min_learning_rate",
            f"{train.min_learning_rate:g} is above train.learning_rate {train.learning_rate:g}; use at most that",
        )
    total = train.steps * train.updates_in_step
    if train.warmup_steps >= total:
        yield (
            "train.warmup_steps",
            f"{train.warmup_steps} must be below the run's {total} optimizer steps (train.steps x "
            "train.updates_per_step x train.passes_per_batch), or the peak learning rate is never reached",
        )


def _lengths(config: RLConfig) -> Iterator[Problem]:
    new_tokens = max(config.rollout.max_new_tokens, config.eval.max_new_tokens or 0)
    longest = config.data.max_prompt_tokens + new_tokens
    yield from engine_length_problems("rollout.engine", config.rollout.engine, longest, "rollout.max_new_tokens")


def rl_warnings(config: RLConfig) -> Iterator[str]:
    """Yield what the user of a valid job should know."""
    yield from _sampling_warnings(config)
    yield from _training_warnings(config)
    yield from objective_warnings(config)
    yield from schedule_warnings(config)
    yield from lora_warnings(config.lora, config.model.dtype, "learning_rate" in config.train.model_fields_set)
    yield from reward_warnings(config.reward)


def _sampling_warnings(config: RLConfig) -> Iterator[str]:
    rollout = config.rollout
    for key, is_truncated in (("top_p", rollout.top_p < 1), ("top_k", rollout.top_k > 0)):
        if is_truncated:
            yield (
                f"rollout.{key}: {getattr(rollout, key)} samples from a truncated distribution, the trainer's "
                "log-probabilities are of the whole one: the ratio is biased at every token"
            )
    if rollout.engine.get("quantization"):
        yield "rollout.engine.quantization: the engine samples from other weights than are trained; the probe may fire"


def _training_warnings(config: RLConfig) -> Iterator[str]:
    train, tolerance = config.train, config.sync.probe_tolerance
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if train.max_tokens_per_micro_batch < longest:
        yield (
            f"train.max_tokens_per_micro_batch: {train.max_tokens_per_micro_batch} is below the longest possible sequence "
            f"of {longest} tokens (data.max_prompt_tokens + rollout.max_new_tokens); such a one gets a micro-batch of its "
            "own and more memory than this bounds"
        )
    if train.schedule == "constant" and train.min_learning_rate > 0:
        yield "train.min_learning_rate: has no effect with train.schedule constant"
    if tolerance is not None and tolerance >= UNSYNCED_GAP_NATS:
        yield (
            f"sync.probe_tolerance: {tolerance:g} nats may not notice an engine that kept its old weights (that gave "
            f"about {UNSYNCED_GAP_NATS})"
        )
    if tolerance is not None and config.model.dtype == "bfloat16" and tolerance < 2 * BFLOAT16_GAP_NATS:
        yield (
            f"sync.probe_tolerance: {tolerance:g} nats is close to bfloat16's own noise (about {BFLOAT16_GAP_NATS}); "
            "the run may stop without a fault"
        )
    if config.checkpoint.every == 0 and config.failures.job_restarts and train.steps > MANY_STEPS:
        yield (
            f"checkpoint.every: 0 writes none before step {train.steps}, so that a job that loses a trainer rank begins again from "
            "step 0; set it, or failures.job_restarts: 0"
        )
    for key, every in (("eval", config.eval.every), ("checkpoint", config.checkpoint.every or 0)):
        if every > train.steps:
            yield f"{key}.every: {every} is above train.steps {train.steps}: none happens during the run"
