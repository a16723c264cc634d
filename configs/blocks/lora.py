"""The block `lora:`: small trained matrices beside frozen ones (LoRA, arXiv 2106.09685)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.blocks.block import Block, located


class Lora(Block):
    """Train low-rank adapters only: W x + scale B (A x), W frozen. No dropout: the same weights must give the same
    log-probabilities every time."""

    rank: int = Field(16, ge=1, le=512, description="Rows of A and columns of B.")
    alpha: int = Field(
        32,
        ge=1,
        description="The adapter's output is scaled by alpha / rank; by alpha / sqrt(rank) if rank_stabilised.",
    )
    rank_stabilised: bool = Field(False, description="Scale by alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732).")
    target_modules: Literal["all-linear"] | list[Annotated[str, Field(min_length=1)]] = Field(
        "all-linear",
        description="Matrices that get an adapter, by their names' last parts, e.g. [q_proj, v_proj]; all-linear: every "
        "linear layer but the language-model head.",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of A; B begins at zero, so the policy begins as the base.")
    adapter: str | None = Field(
        None, min_length=1, description="Folder of an adapter (PEFT format) to start from; empty: a fresh one."
    )
    sync: Literal["adapter", "merged"] = Field(
        "adapter",
        description="What goes to the engines: adapter (small; the engine computes with base and adapter as the trainer "
        "does) or merged (whole matrices; for models whose adapters vLLM does not take. In bfloat16 merging rounds away "
        "updates that are small beside the weights).",
    )

    @model_validator(mode="after")
    def _some_target(self) -> Lora:
        if not self.target_modules:
            raise ValueError("'target_modules' is empty, so nothing would be trained; use all-linear or name some")
        return self

    @property
    def scale(self) -> float:
        """Return the factor on B A."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)

    def located(self) -> Lora:
        """Return the same block with the absolute path of the adapter, for other processes."""
        return self.model_copy(update={"adapter": self.adapter and located(self.adapter)})
