"""Rules on the block `lora:`."""

from __future__ import annotations

from collections.abc import Iterator

from configs.blocks.lora import Lora
from configs.rules.problem import Problem


def lora_problems(lora: Lora | None, merged_checkpoints: bool) -> Iterator[Problem]:
    """Yield what is wrong with the LoRA block, or with its absence."""
    if merged_checkpoints and lora is None:
        yield "checkpoint.merged", "there is nothing to merge without lora; leave it out, or add a lora block"


def lora_warnings(lora: Lora | None, dtype: str, gives_learning_rate: bool) -> Iterator[str]:
    """Yield what the user of a valid block should know."""
    if lora is None:
        return
    if not gives_learning_rate:
        yield (
            "train.learning_rate: the default is made for training every weight; adapters usually want about ten times as "
            "much (docs/guide/LORA.md)"
        )
    if lora.sync == "merged" and dtype == "bfloat16":
        yield (
            "lora.sync: merged weights are rounded to bfloat16, so engines do not see updates smaller than a weight's last "
            "bit, and the probe's tolerance is too wide to tell; use adapter, or model.dtype float32"
        )
