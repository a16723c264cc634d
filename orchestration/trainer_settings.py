"""What a trainer rank is told, and what follows from it: learning rates, DeepSpeed's configuration.

Apart from the trainer, so that the driver need not import DeepSpeed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from configs.lora import Lora
from configs.objective import Critic, Objective
from configs.schema import Model
from configs.training import Optimization


@dataclass(frozen=True)
class TrainerSettings:
    """What a trainer rank needs to know, beyond the method."""

    model: Model
    train: Optimization
    temperature: float  # the sampling temperature, of the rollouts that are trained on
    seed: int
    total_updates: int  # optimizer steps of the whole run, for the learning-rate schedule
    objective: Objective = field(default_factory=Objective)
    critic: Critic = field(default_factory=Critic)
    lora: Lora | None = None  # None: every weight is trained
    merged_checkpoints: bool = False
    replay_folder: str = "replay"  # where steps are kept whole
    replay_steps: tuple[int, ...] = ()
    replay_keep: int = 2


def learning_rate_at(update: int, train: Optimization, total_updates: int) -> float:
    """Learning rate of optimizer step `update` (from 0). Warm-up starts above zero, and the last step is still above
    the minimum that cosine and linear lead to: no step has a rate of zero."""
    if update < train.warmup_steps:
        return train.learning_rate * (update + 1) / train.warmup_steps
    span = max(total_updates - train.warmup_steps, 1)
    progress = min((update - train.warmup_steps) / span, 1.0)
    decay = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}[
        train.schedule
    ]
    return train.min_learning_rate + (train.learning_rate - train.min_learning_rate) * decay


def deepspeed_config(model: Model, train: Optimization, ranks: int) -> dict[str, Any]:
    """DeepSpeed's configuration: numbers everywhere, since outside the Hugging Face integration it drops "auto" values."""
    config: dict[str, Any] = {
        "train_batch_size": ranks,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # the boundary is set by hand: steps have as many micro-batches as they need
        "gradient_clipping": train.max_grad_norm,
        "zero_optimization": {
            "stage": train.zero_stage,
            "reduce_bucket_size": 50_000_000,
            "allgather_bucket_size": 50_000_000,
            "stage3_prefetch_bucket_size": 50_000_000,
            "stage3_param_persistence_threshold": 100_000,
        },
        # Without the check a bfloat16 run under ZeRO 1 and 2 would step on NaN.
        "bf16": {"enabled": model.dtype == "bfloat16", "check_grad_overflow": True},
        "zero_allow_untested_optimizer": True,  # torch's fused AdamW; tested here at every stage
        "steps_per_print": 10**9,
    }
    if model.dtype == "bfloat16" and train.zero_stage > 0:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    for key, value in train.deepspeed.items():
        config[key] = {**config[key], **value} if isinstance(config.get(key), dict) else value
    return config
