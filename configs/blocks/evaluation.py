"""The configuration of an evaluation of a model on its own (main_eval.py)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from configs.blocks.block import Block
from configs.blocks.rl import Data, Model, Reward, Run


class EvalRun(Block):
    """How an evaluation on its own draws responses: pass@k needs at least k samples per prompt."""

    samples_per_prompt: int = Field(
        8, ge=1, description="Sampled responses per prompt; pass@k is estimated for k = 1, 2, 4, ... up to this."
    )
    temperature: float = Field(1.0, gt=0, le=5, description="Temperature of the samples.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling.")
    greedy: bool = Field(True, description="Also take one greedy response per prompt: greedy accuracy.")
    max_new_tokens: int = Field(512, ge=1, description="Responses are cut at this length.")
    max_prompts: int = Field(1000, ge=1, description="Prompts used.")
    split: Literal["heldout", "train", "all"] = Field(
        "heldout", description="Judge on the held-out part of data.sources, on the rest, or on both."
    )


class EvalConfig(Block):
    """An evaluation of a model or checkpoint on its own (main_eval.py)."""

    run: Run = Field(default_factory=lambda: Run(name="eval", dir="evals"))
    model: Model
    data: Data
    reward: Reward
    eval: EvalRun = Field(default_factory=EvalRun)
    engines: int = Field(1, ge=1, le=10_000, description="vLLM engines.")
    tensor_parallel_size: int = Field(1, ge=1, le=10_000, description="Devices per engine.")
    engine: dict[str, Any] = Field(default_factory=dict, description="Passed to vLLM as it is.")
