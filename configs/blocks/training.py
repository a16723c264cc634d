"""The blocks `train:`: what reinforcement and supervised learning have in common, and what each adds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from configs.blocks.block import Block


class Optimization(Block):
    """The optimizer and its sharding."""

    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Learning rate after warm-up.")
    warmup_steps: int = Field(
        0, ge=0, description="Optimizer steps of linear warm-up; the first already has a rate above 0."
    )
    min_learning_rate: float = Field(0.0, ge=0, description="Where linear and cosine end.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay.")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999), strict=False, description="AdamW betas."
    )
    eps: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are scaled down to this global norm.")
    max_skipped_in_a_row: int = Field(
        3,
        ge=1,
        description="An update with an Inf or NaN in an advantage, loss or gradient is skipped on all ranks and kept "
        "for the step debugger; after this many in a row the run writes a checkpoint and stops.",
    )
    max_tokens_per_micro_batch: int = Field(4096, ge=1, description="Tokens packed into one forward pass per rank.")
    share_prompts: bool = Field(True, description="Compute a group's prompt once for all its responses.")
    zero_stage: Literal[0, 1, 2, 3] = Field(
        1, description="DeepSpeed ZeRO stage: what is sharded over ranks (1 optimizer, 2 gradients, 3 parameters)."
    )
    deepspeed: dict[str, Any] = Field(
        default_factory=dict, description="Merged into DeepSpeed's configuration last; numbers only, never 'auto'."
    )


class Train(Optimization):
    """How the policy is updated."""

    steps: int = Field(100, ge=1, description="Steps: generate, train, sync.")
    updates_per_step: int = Field(
        1,
        ge=1,
        description="Optimizer steps per step, or per pass if there are several; the step's prompts are split evenly "
        "among them.",
    )
    passes_per_batch: int = Field(
        1,
        ge=1,
        description="How often a step goes over its responses (PPO's epochs, GRPO's mu), each time in updates_per_step "
        "optimizer steps. pi_old and the advantages stay those of the step's start.",
    )
    drop_zero_variance_groups: bool = Field(
        True,
        description="Leave groups whose rewards are all equal out of the forward pass (their advantage is 0); they "
        "stay in the denominators.",
    )
    ranks: int = Field(1, ge=1, le=10_000, description="Data-parallel trainer ranks.")
    threads_per_rank: int = Field(
        0,
        ge=0,
        description="CPU threads of a trainer rank; 0: the trainer's cores (placement.trainer_cores) divided by ranks.",
    )

    @property
    def updates_in_step(self) -> int:
        """Return the number of optimizer steps in a step, over all passes."""
        return self.updates_per_step * self.passes_per_batch


class SLTrain(Optimization):
    """How the model is updated. Ranks are the processes that torchrun or deepspeed starts; one without them."""

    batch_size: int = Field(
        32, ge=1, description="Examples (pairs, for preference methods) per optimizer step, over all ranks."
    )
    epochs: float = Field(1.0, gt=0, description="Passes over the training examples; not used when steps is given.")
    steps: int | None = Field(None, ge=1, description="Optimizer steps. Empty: as many as `epochs` takes.")
