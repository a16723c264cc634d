"""Rules that span keys. Problems refuse a configuration (the validators in configs/blocks/rl.py call them); warnings let
it run and say what the user should know.

A problem is (dotted key, message with the way out). Each function yields all it finds, so that one message lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from configs.blocks.lora import lora_problems, lora_warnings
from configs.blocks.placement import placement_problems
from configs.rules.objective import objective_problems, objective_warnings
from configs.rules.schedule import schedule_problems, schedule_warnings

if TYPE_CHECKING:
    from configs.blocks.rl import EvalConfig, RLConfig
    from configs.blocks.training import Optimization

Problem = tuple[str, str]
Config = TypeVar("Config", bound=BaseModel)

# Keys of pass-through blocks that a named key owns; setting both would let them disagree silently.
OWNED_BY_DEEPSPEED = {
    "train_batch_size": "it follows from rollout.prompts_per_step and rollout.responses_per_prompt",
    "train_micro_batch_size_per_gpu": "use train.max_tokens_per_micro_batch",
    "gradient_accumulation_steps": "it follows from train.max_tokens_per_micro_batch",
    "gradient_clipping": "use train.max_grad_norm",
    "optimizer": "use train.learning_rate, betas, eps and weight_decay",
    "scheduler": "use train.schedule and train.warmup_steps",
    "bf16.enabled": "use model.dtype",
    "fp16.enabled": "use model.dtype (float16 is not supported)",
    "zero_optimization.stage": "use train.zero_stage",
}
OWNED_BY_ENGINE = {
    "model": "use model.path",
    "tokenizer": "use model.path",
    "dtype": "use model.dtype",
    "trust_remote_code": "use model.trust_remote_code",
    "device": "use model.device",
    "tensor_parallel_size": "use the tensor_parallel_size beside it",
    "seed": "one seed for all requests gives all prompts the same noise; use rollout.seeded",
    "logprobs_mode": "the log-probabilities must be those of the sampled distribution",
    "worker_extension_cls": "weight sync uses it; see the sync block",
    "weight_transfer_config": "use the sync block",
    "enable_lora": "use the lora block",
    "enable_sleep_mode": "engines that share a GPU sleep; see placement.colocate",
    "max_lora_rank": "use lora.rank",
}
MANY_STEPS = 200  # more than one would do again without being asked
UNSYNCED_GAP_NATS = 0.4  # mean gap seen when an engine kept its old weights
BFLOAT16_GAP_NATS = 0.04  # mean gap of healthy bfloat16 engines


def enforced(config: Config, problems: Iterable[Problem]) -> Config:
    """The configuration itself, or one pydantic error that holds every problem."""
    found = [
        InitErrorDetails(
            type=PydanticCustomError("rule", "{text}", {"text": text}), loc=tuple(key.split(".")), input=None
        )
        for key, text in problems
    ]
    if found:
        raise ValidationError.from_exception_data(type(config).__name__, found)
    return config


def rl_problems(config: RLConfig) -> Iterator[Problem]:
    yield from _batch(config)
    yield from _schedule(config)
    yield from _lengths(config)
    yield from objective_problems(config)
    yield from schedule_problems(config)
    yield from placement_problems(config)
    yield from lora_problems(config.lora, config.checkpoint.merged)
    yield from _reward_parts(config.reward)
    yield from deepspeed_problems(config.train)
    yield from _engine("rollout.engine", config.rollout.engine)
    if config.eval.temperature == 0 and config.eval.samples_per_prompt > 1:
        yield (
            "eval.samples_per_prompt",
            f"{config.eval.samples_per_prompt} greedy responses to one prompt are all the same; "
            "use 1, or an eval.temperature above 0",
        )


def eval_problems(config: EvalConfig) -> Iterator[Problem]:
    yield from _reward_parts(config.reward)
    yield from _engine("engine", config.engine)
    longest = config.data.max_prompt_tokens + config.eval.max_new_tokens
    yield from _engine_length("engine", config.engine, longest, "eval.max_new_tokens")


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
    """The allowed values next below and above, as text."""
    below = [n for n in allowed if 0 < n < value][-1:]
    return " or ".join(str(n) for n in below + [n for n in allowed if n > value][:1])


def _schedule(config: RLConfig) -> Iterator[Problem]:
    train = config.train
    if train.min_learning_rate > train.learning_rate:
        yield (
            "train.min_learning_rate",
            f"{train.min_learning_rate:g} is above train.learning_rate {train.learning_rate:g}; use at most that",
        )
    total = train.steps * train.updates_per_step
    if train.warmup_steps >= total:
        yield (
            "train.warmup_steps",
            f"{train.warmup_steps} must be below the run's {total} optimizer steps (train.steps x "
            "train.updates_per_step), or the peak learning rate is never reached",
        )


def _lengths(config: RLConfig) -> Iterator[Problem]:
    new_tokens = max(config.rollout.max_new_tokens, config.eval.max_new_tokens or 0)
    longest = config.data.max_prompt_tokens + new_tokens
    yield from _engine_length("rollout.engine", config.rollout.engine, longest, "rollout.max_new_tokens")


def _engine_length(key: str, engine: dict[str, Any], longest: int, new_tokens_key: str) -> Iterator[Problem]:
    limit = engine.get("max_model_len")
    if isinstance(limit, int) and limit < longest:
        yield (
            f"{key}.max_model_len",
            f"{limit} cannot hold the longest sequence of {longest} tokens (data.max_prompt_tokens + "
            f"{new_tokens_key}); raise it or lower one of those",
        )


def _reward_parts(reward: Any) -> Iterator[Problem]:
    if all(part.weight == 0 for part in reward.parts):
        yield "reward.parts", "every weight is 0, so every reward is 0; give a part a weight"


def _passed_through(key: str, block: dict[str, Any], owned: dict[str, str]) -> Iterator[Problem]:
    for path, way_out in owned.items():
        node: Any = block
        for name in path.split("."):
            node = node.get(name) if isinstance(node, dict) else None
        if node is not None:
            yield f"{key}.{path}", f"is set elsewhere: {way_out}"


def deepspeed_problems(train: Optimization) -> Iterator[Problem]:
    """What train.deepspeed may not say because a key of ours does, or because DeepSpeed would drop it."""
    yield from _passed_through("train.deepspeed", train.deepspeed, OWNED_BY_DEEPSPEED)
    yield from _auto_values("train.deepspeed", train.deepspeed)


def _auto_values(key: str, node: Any) -> Iterator[Problem]:
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _auto_values(f"{key}.{name}", value)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _auto_values(f"{key}.{index}", value)
    elif node == "auto":
        yield key, "'auto' is dropped silently by DeepSpeed here; write the number"


def _engine(key: str, engine: dict[str, Any]) -> Iterator[Problem]:
    yield from _passed_through(key, engine, OWNED_BY_ENGINE)
    utilization = engine.get("gpu_memory_utilization")
    if utilization is not None and not (isinstance(utilization, int | float) and 0 < utilization <= 1):
        yield f"{key}.gpu_memory_utilization", f"must be a share above 0 and at most 1; given {utilization!r}"


def eval_warnings(config: EvalConfig) -> list[str]:
    """Return what the user should know about a valid evaluation, one sentence each, beginning with the key."""
    return list(_reward_warnings(config.reward))


def warnings_for(config: RLConfig) -> list[str]:
    """Return what the user should know about a valid configuration, one sentence each, beginning with the key."""
    return [
        *_sampling_warnings(config),
        *_training_warnings(config),
        *objective_warnings(config),
        *schedule_warnings(config),
        *lora_warnings(config.lora, config.model.dtype, "learning_rate" in config.train.model_fields_set),
        *_reward_warnings(config.reward),
    ]


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
    for key, every in (("eval", config.eval.every), ("checkpoint", config.checkpoint.every)):
        if every > train.steps:
            yield f"{key}.every: {every} is above train.steps {train.steps}: none happens during the run"


def _reward_warnings(reward: Any) -> Iterator[str]:
    most = sum(part.weight for part in reward.parts if part.weight > 0)
    if most < reward.pass_threshold:
        yield (
            f"reward.pass_threshold: {reward.pass_threshold:g} is above the sum of the positive weights {most:g}; "
            "parts that pay 0 to 1 can never pass"
        )
