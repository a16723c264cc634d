"""Compute numbers of every action token under the present weights: pi_old, pi_ref, the critic's values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_feeds.packing import pack
from data_feeds.responses import Responses
from orchestration.cluster.watchdog import Call
from orchestration.trainer.ranks import TrainerRanks
from records.rollout import Trajectory

Recomputed = dict[str, list[np.ndarray]]  # by name, one float32 array of its action tokens per trajectory


def recompute(
    trainers: TrainerRanks, trajectories: list[Trajectory], names: Sequence[str], max_tokens: int, share_prompts: bool,
    temperature: float | None = None,
) -> Call[Recomputed]:  # fmt: skip
    """Let the ranks compute old_logprobs, ref_logprobs or old_values of these trajectories under their present weights.

    temperature: None means that of the sampling. With old_values the answer has final_values too, [1] per trajectory:
    the value of the state after its last token.
    """
    has_values = "old_values" in names
    scored = [t.with_a_state_after() for t in trajectories] if has_values else trajectories
    count = len(scored)
    per_rank = pack(
        Responses(scored),
        groups=np.unique([t.group_id for t in scored], return_inverse=True)[1],
        loss_weights=np.ones(count, dtype=np.float32),
        columns={},
        max_tokens=max_tokens,
        ranks=len(trainers.actors),
        share_prompts=share_prompts,
    )

    def by_trajectory(answers: list[list[dict[str, np.ndarray]]]) -> Recomputed:
        columns: Recomputed = {name: [np.zeros(0, dtype=np.float32)] * count for name in names}
        for batches, of_batches in zip(per_rank, answers, strict=True):
            for batch, by_name in zip(batches, of_batches, strict=True):
                for name, values in by_name.items():
                    for index, own in batch.by_trajectory(values):
                        columns[name][index] = own
        if has_values:
            columns["final_values"] = [values[-1:] for values in columns["old_values"]]
            for name in names:
                columns[name] = [values[:-1] for values in columns[name]]
        return columns

    return trainers.recompute(per_rank, names, temperature).then(by_trajectory)
