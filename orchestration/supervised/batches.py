"""Turn examples (demonstrations, pairs or labelled responses) into micro-batches for all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from algs.method import PolicyMethod
from algs.parts.aggregation import token_weights
from configs.blocks.supervised import SLConfig
from data_feeds.examples.examples import Example
from data_feeds.packing import MicroBatch, pack
from data_feeds.responses import Responses

Reference = Mapping[tuple[str, int], np.ndarray]  # log pi_ref of the trained tokens by (group_id, sample)


class Packing:
    """Pack a job's examples. The result depends on the examples alone, so it is the same on every rank."""

    def __init__(self, config: SLConfig, method: PolicyMethod, ranks: int) -> None:
        self.train, self.max_tokens = config.train, config.data.max_tokens
        self.aggregation = config.objective.aggregation or method.aggregation
        self.whole_groups = method.data == "pairs"
        # A response's score is the value of the state after its last token.
        self.scores_responses = "values" in method.needs()
        self.ranks = ranks
        self.reference: Reference | None = None  # precomputed, when objective.reference says so

    def of(self, examples: Sequence[Example]) -> list[list[MicroBatch]]:
        """Return the micro-batches of each rank. The loss weights contain the denominators over all the examples."""
        members = [t for example in examples for t in example]
        groups = np.repeat(np.arange(len(examples)), [len(example) for example in examples])
        if self.scores_responses:
            members = [t.with_a_state_after() for t in members]
        responses = Responses(members)
        columns = responses.columns(0, advantages=np.zeros(len(members), dtype=np.float32))
        if self.reference is not None:
            columns["ref_logprobs"] = np.concatenate([self.reference[t.group_id, t.sample] for t in members])
        lengths = torch.from_numpy(responses.counts)
        weights = token_weights(self.aggregation, lengths, torch.from_numpy(groups), self.max_tokens)
        return pack(
            responses,
            groups=groups,
            loss_weights=weights.numpy(),
            columns=columns,
            max_tokens=self.train.max_tokens_per_micro_batch,
            ranks=self.ranks,
            share_prompts=self.train.share_prompts and self.whole_groups,
            whole_groups=self.whole_groups,
        )
