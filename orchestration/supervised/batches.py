"""From examples (a demonstration, a pair, a labelled response) to micro-batches of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from algs.method import PolicyMethod
from algs.parts.aggregation import token_weights
from configs.blocks.supervised import SLConfig
from data_feeds.examples.examples import Example
from data_feeds.packing import MicroBatch, pack
from orchestration.trainer.recompute import with_a_state_after

Reference = Mapping[tuple[str, int], np.ndarray]  # log pi_ref of the trained tokens by (group_id, sample)


class Packing:
    """How a job packs: the same on every rank, a pure function of the examples."""

    def __init__(self, config: SLConfig, method: PolicyMethod, ranks: int) -> None:
        self.train, self.max_tokens = config.train, config.data.max_tokens
        self.aggregation = config.objective.aggregation or method.aggregation
        self.whole_groups = method.data == "pairs"
        # A response's score is the value of the state after its last token.
        self.scores_responses = "values" in method.needs()
        self.ranks = ranks
        self.reference: Reference | None = None  # precomputed

    def of(self, examples: Sequence[Example]) -> list[list[MicroBatch]]:
        """Micro-batches of each rank. Loss weights hold the denominators of all the examples together."""
        members = [t for example in examples for t in example]
        groups = np.repeat(np.arange(len(examples)), [len(example) for example in examples])
        columns = None
        if self.reference is not None:
            columns = {"ref_logprobs": [self.reference[t.group_id, t.sample] for t in members]}
        if self.scores_responses:
            members = [with_a_state_after(t) for t in members]
        lengths = torch.tensor([t.action_tokens for t in members])
        weights = token_weights(self.aggregation, lengths, torch.from_numpy(groups), self.max_tokens)
        return pack(
            trajectories=members,
            groups=groups,
            advantages=np.zeros(len(members), dtype=np.float32),
            loss_weights=weights.numpy(),
            version=0,
            max_tokens=self.train.max_tokens_per_micro_batch,
            ranks=self.ranks,
            share_prompts=self.train.share_prompts and self.whole_groups,
            columns=columns,
            whole_groups=self.whole_groups,
        )
