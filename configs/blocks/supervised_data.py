"""The data block of supervised and preference jobs (main_sl.py)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from configs.blocks.block import Block
from configs.blocks.source import Source


class SLData(Block):
    """The rows to learn from, and held-out rows that share nothing with them.

    The method decides which columns of a row it reads: a demonstration's prompt and answer (or its messages), a pair's
    chosen and rejected response, a labelled row's response and label.
    """

    sources: list[Source] = Field(min_length=1, description="Training rows.")
    heldout_sources: list[Source] = Field(
        default_factory=list, description="Held-out rows; empty: a part of `sources` is split off."
    )
    heldout_fraction: float = Field(
        0.05,
        ge=0,
        lt=1,
        description="Share of split keys held out when heldout_sources is empty; 0: nothing is held out.",
    )
    split_by: Literal["row", "prompt", "unordered_numbers"] = Field(
        "prompt",
        description="What must not be on both sides of the split: the row, the prompt's text, or the multiset of "
        "numbers in it (2+7 and 7+2 are twins).",
    )
    split_seed: int = Field(0, ge=0, description="Seed of generated rows and of the split; kept apart from run.seed.")
    mixture: Literal["proportional", "fixed", "per_step"] = Field(
        "proportional",
        description="How several sources are mixed: proportional draws from all rows alike; fixed puts each source's share "
        "(sources[].weight) into every batch, to the nearest row; per_step draws new shares around the weights every step.",
    )
    mixture_concentration: float = Field(
        16.0, gt=0, description="per_step: concentration of the Dirichlet distribution; large stays near the weights."
    )
    shuffle: bool = Field(True, description="A new random order each epoch; false: rows in the order of the sources.")
    system_prompt: str | None = Field(None, description="System message put before every chat.")
    train_on: Literal["all_assistant", "last_assistant"] = Field(
        "all_assistant",
        description="Which turns of a demonstration are learned; prompts of pairs and labels never are.",
    )
    max_tokens: int = Field(2048, ge=2, description="Longest example, in tokens of prompt and response together.")
    too_long: Literal["skip", "truncate", "error"] = Field(
        "skip",
        description="What becomes of longer ones: left out, cut at the end (left out when nothing to learn remains), or "
        "refused before the first step (which takes a pass over all rows). Counted.",
    )
    bad_rows: Literal["skip", "error"] = Field(
        "skip",
        description="What becomes of rows that cannot be read or rendered: left out, counted and the first of them shown, or "
        "all refused before the first step (which takes a pass over all rows).",
    )
    drop_duplicates: bool = Field(False, description="Leave out rows whose chat is exactly that of an earlier row.")
    cache_dir: str | None = Field(
        None,
        description="Folder for memory-mapped copies of parquet files; empty: ~/.cache/feynrl/rows.",
    )

    @model_validator(mode="after")
    def _weights_mean_something(self) -> SLData:
        if self.mixture == "proportional" and len({source.weight for source in self.sources}) > 1:
            raise ValueError(
                "'weight' has no effect with mixture: proportional; use mixture: fixed (or per_step), or leave weights out"
            )
        if any(source.weight != 1 for source in self.heldout_sources):
            raise ValueError("'weight' has no effect on held-out sources: all their rows are judged; leave it out")
        return self
