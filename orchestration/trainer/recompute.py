"""Numbers of every action token under the weights of this moment: pi_old, pi_ref, the critic's values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from data_feeds.packing import pack
from records.rollout import Trajectory

if TYPE_CHECKING:
    from orchestration.trainer.ranks import TrainerRanks


def recomputed_columns(
    trainers: TrainerRanks, trajectories: list[Trajectory], names: Sequence[str], version: int, max_tokens: int,
    share_prompts: bool, temperature: float | None = None,
) -> dict[str, list[np.ndarray]]:  # fmt: skip
    """By name, one float32 array of its action tokens per trajectory. Names: old_logprobs, ref_logprobs, old_values.

    temperature: None is that of the sampling. With old_values there is final_values too, [1] per trajectory: the value of the state after its last token.
    """
    has_values = "old_values" in names
    asked = [with_a_state_after(t) for t in trajectories] if has_values else trajectories
    count = len(asked)
    per_rank = pack(
        trajectories=asked,
        groups=np.unique([t.group_id for t in asked], return_inverse=True)[1],
        advantages=np.zeros(count, dtype=np.float32),
        loss_weights=np.ones(count, dtype=np.float32),
        version=version,
        max_tokens=max_tokens,
        ranks=len(trainers.actors),
        share_prompts=share_prompts,
    )
    found: dict[str, list[np.ndarray]] = {name: [np.zeros(0, dtype=np.float32)] * count for name in names}
    for batches, columns in zip(per_rank, trainers.recompute(per_rank, names, temperature), strict=True):
        for batch, by_name in zip(batches, columns, strict=True):
            for name, values in by_name.items():
                for index, own in batch.by_trajectory(values):
                    found[name][index] = own
    if has_values:
        found["final_values"] = [values[-1:] for values in found["old_values"]]
        for name in names:
            found[name] = [values[:-1] for values in found[name]]
    return found


def with_a_state_after(t: Trajectory) -> Trajectory:
    """The trajectory with one more action token, whose state is the one after the last real token. The token itself is
    predicted only, never an input, so that which one it is does not matter."""

    def longer(array: np.ndarray, value: float) -> np.ndarray:
        return np.append(array, np.asarray(value, dtype=array.dtype))

    return dataclasses.replace(
        t,
        token_ids=longer(t.token_ids, 0),
        behavior_logprobs=longer(t.behavior_logprobs, 0),
        versions=longer(t.versions, t.versions[-1]),
        is_action=longer(t.is_action, True),
        turn=longer(t.turn, t.turn[-1]),
    )
