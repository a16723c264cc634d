"""Numbers of every action token under the weights of this moment: pi_old, pi_ref, the critic's values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_feeds.packing import pack
from data_feeds.responses import Responses
from orchestration.trainer.ranks import TrainerRanks
from records.rollout import Trajectory


def recomputed_columns(
    trainers: TrainerRanks, trajectories: list[Trajectory], names: Sequence[str], max_tokens: int, share_prompts: bool,
    temperature: float | None = None,
) -> dict[str, list[np.ndarray]]:  # fmt: skip
    """Return, by name, one float32 array of its action tokens per trajectory. Names: old_logprobs, ref_logprobs, old_values.

    temperature: None is that of the sampling. With old_values there is final_values too, [1] per trajectory: the value of
    the state after its last token.
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
    columns: dict[str, list[np.ndarray]] = {name: [np.zeros(0, dtype=np.float32)] * count for name in names}
    for batches, computed in zip(per_rank, trainers.recompute(per_rank, names, temperature), strict=True):
        for batch, by_name in zip(batches, computed, strict=True):
            for name, values in by_name.items():
                for index, own in batch.by_trajectory(values):
                    columns[name][index] = own
    if has_values:
        columns["final_values"] = [values[-1:] for values in columns["old_values"]]
        for name in names:
            columns[name] = [values[:-1] for values in columns[name]]
    return columns
