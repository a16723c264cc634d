"""What a supervised or preference job may say (main_sl.py): SFT, DPO and kin, reward models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, model_validator

from configs.blocks.block import Block
from configs.blocks.capture import Capture
from configs.blocks.lora import Lora, lora_problems, lora_warnings
from configs.blocks.rl import Algorithm, Checkpoint, Model, Run
from configs.blocks.supervised_data import SLData
from configs.blocks.training import SLTrain
from configs.rules import rl as rules


class SLObjective(Block):
    """What stands around the method's loss. Empty keys take the method's own choice."""

    aggregation: Literal["token_mean", "sequence_mean", "prompt_mean"] | None = Field(
        None,
        description="How token losses become one number; denominators are global over the optimizer step. Empty: the method's "
        "own: token_mean for SFT, the mean over pairs for preference methods.",
    )
    reference: Literal["precomputed", "model"] = Field(
        "precomputed",
        description="Where methods with a reference policy get its log-probabilities: precomputed once with the starting "
        "weights, before the first step, and kept on disk beside the data; or from a second, frozen copy of the model at every "
        "step.",
    )
    reference_cache_dir: str = Field(
        "runs/reference_cache", min_length=1, description="Where precomputed reference log-probabilities are kept."
    )


class SLEval(Block):
    """Held-out loss and metrics: before, during and after."""

    every: int = Field(50, ge=0, description="Optimizer steps between evaluations; 0: only before and after.")
    max_examples: int = Field(500, ge=1, description="Held-out examples (or pairs) used.")


class SLConfig(Block):
    """A supervised or preference learning job (main_sl.py)."""

    run: Run = Field(default_factory=lambda: Run(name="sl"))
    model: Model
    data: SLData
    algorithm: Algorithm
    objective: SLObjective = Field(default_factory=SLObjective)
    lora: Lora | None = Field(None, description="Train low-rank adapters only; empty: every weight is trained.")
    train: SLTrain = Field(default_factory=SLTrain)
    eval: SLEval = Field(default_factory=SLEval)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    capture: Capture = Field(default_factory=Capture)

    @model_validator(mode="after")
    def _rules(self) -> SLConfig:
        return rules.enforced(self, sl_problems(self))


def sl_problems(config: SLConfig) -> Iterator[rules.Problem]:
    from plugins import methods as algorithm  # imports torch

    train = config.train
    method = algorithm.find(config.algorithm.name)
    if method.data == "prompts":
        yield (
            "algorithm.name",
            f"'{config.algorithm.name}' learns from responses it samples itself: run it with main_rl.py; here go "
            f"{', '.join(name for name, entry in algorithm.listed().items() if not entry.has_advantages)}",
        )
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
    yield from rules.deepspeed_problems(train)
    yield from lora_problems(config.lora, config.checkpoint.merged)
    if config.lora is not None and config.algorithm.name == "reward_model":
        yield "lora", "a reward model is trained whole: its value head has no adapter format to be saved in"


def sl_warnings(config: SLConfig) -> Iterator[str]:
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
