"""The configuration of a supervised or preference job (main_sl.py): SFT, DPO and similar methods, reward models."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.blocks.block import Block
from configs.blocks.capture import Capture
from configs.blocks.lora import Lora
from configs.blocks.rl import Algorithm, Checkpoint, Model, Run
from configs.blocks.supervised_data import SLData
from configs.blocks.training import SLTrain


class SLObjective(Block):
    """The settings around the method's loss. Empty keys take the method's own choice."""

    aggregation: Literal["token_mean", "sequence_mean", "prompt_mean"] | None = Field(
        None,
        description="How token losses become one number; denominators are global over the update. Empty: the method's "
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
