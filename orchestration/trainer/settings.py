"""The settings of a trainer rank, in a file of their own, so that the driver need not import DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass, field

from configs.blocks.lora import Lora
from configs.blocks.objective import Critic, Objective
from configs.blocks.rl import Model
from configs.blocks.training import Optimization


@dataclass(frozen=True)
class TrainerSettings:
    """The settings that a trainer rank needs beside the method."""

    model: Model
    train: Optimization
    temperature: float  # the sampling temperature, of the rollouts that are trained on
    seed: int
    total_updates: int  # of the whole run, for the learning-rate schedule
    longest: int = 0  # tokens of the longest sequence that the job allows; see `load_policy`
    objective: Objective = field(default_factory=Objective)
    critic: Critic = field(default_factory=Critic)
    lora: Lora | None = None  # None: every weight is trained
    merged_checkpoints: bool = False
    base_name: str | None = None  # what the user called the model, for an adapter's files; None: model.path
    capture_folder: str = "captured_steps"  # where updates are kept whole
    capture_steps: tuple[int, ...] = ()
    capture_keep: int = 2
