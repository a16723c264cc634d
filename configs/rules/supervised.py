"""Rules on supervised and preference jobs."""

from __future__ import annotations

from collections.abc import Iterator

from configs.blocks.supervised import SLConfig
from configs.rules.lora import lora_problems, lora_warnings
from configs.rules.objective import split_problems
from configs.rules.passed_through import deepspeed_problems
from configs.rules.problem import Problem
from plugins.kinds import find, listed


def sl_problems(config: SLConfig) -> Iterator[Problem]:
    """Yield what is wrong with the job."""
    train = config.train
    method = find("method", config.algorithm.name)
    if method.data == "prompts":
        supervised = [name for name, entry in listed("method").items() if not entry.has_advantages]
        yield (
            "algorithm.name",
            f"'{config.algorithm.name}' learns from responses it samples itself: run it with main_rl.py; here go "
            f"{', '.join(supervised)}",
        )
    else:
        yield from split_problems(config.algorithm.name, config.algorithm.make_method())
    if method.data == "pairs" and not train.share_prompts:
        yield (
            "train.share_prompts",
            "must be true for pairs: chosen and rejected share their prompt and one forward pass",
        )
    if method.data == "pairs" and config.objective.aggregation not in (None, "prompt_mean"):
        yield (
            "objective.aggregation",
            f"{config.objective.aggregation} would weigh pairs by their length; the loss of '{config.algorithm.name}' is one "
            "number a pair, so leave it empty",
        )
    if method.data == "labels" and config.objective.aggregation == "token_mean":
        yield (
            "objective.aggregation",
            f"token_mean would weigh responses by their length; the loss of '{config.algorithm.name}' is one number a "
            "response, so leave it empty",
        )
    if train.min_learning_rate > train.learning_rate:
        yield (
            "train.min_learning_rate",
            f"{train.min_learning_rate:g} is above train.learning_rate {train.learning_rate:g}; use at most that",
        )
    if train.steps is not None and train.warmup_steps >= train.steps:
        yield "train.warmup_steps", f"{train.warmup_steps} must be below train.steps {train.steps}"
    yield from deepspeed_problems(train)
    yield from lora_problems(config.lora, config.checkpoint.merged)
    if config.lora is not None and config.algorithm.name == "reward_model":
        yield "lora", "a reward model is trained whole: its value head has no adapter format to be saved in"


def sl_warnings(config: SLConfig) -> Iterator[str]:
    """Yield what the user of a valid job should know."""
    train = config.train
    if train.max_tokens_per_micro_batch < config.data.max_tokens:
        yield (
            f"train.max_tokens_per_micro_batch: {train.max_tokens_per_micro_batch} is below data.max_tokens "
            f"{config.data.max_tokens}; a longer example gets a micro-batch of its own and more memory than this bounds"
        )
    if train.schedule == "constant" and train.min_learning_rate > 0:
        yield "train.min_learning_rate: has no effect with train.schedule constant"
    if train.steps is not None and "epochs" in train.model_fields_set:
        yield "train.epochs: has no effect beside train.steps"
    yield from lora_warnings(config.lora, config.model.dtype, "learning_rate" in train.model_fields_set)
