"""One synchronisation: publish the trainer's weights, load them into every engine, prove that the engines hold them."""

from __future__ import annotations

import numpy as np

from configs.schema import RLConfig
from data_feeds.packing import DUMMY, pack
from orchestration.metrics import Tally
from orchestration.probe import compare, tolerance_for
from orchestration.rollout_actor import RolloutGroup
from orchestration.trainer_actor import TrainerGroup
from rollouts.records import Prompt, Trajectory
from rollouts.sampling import Sampling


def trainer_logprobs(
    trainers: TrainerGroup, trajectories: list[Trajectory], version: int, max_tokens: int
) -> list[np.ndarray]:
    """The trainer's log-probabilities of the trajectories' action tokens, under its current weights."""
    count = len(trajectories)
    per_rank = pack(
        trajectories=trajectories,
        groups=np.arange(count),
        advantages=np.zeros(count, dtype=np.float32),
        loss_weights=np.ones(count, dtype=np.float32),
        version=version,
        max_tokens=max_tokens,
        ranks=len(trainers.actors),
        share_prompts=False,
    )
    found: list[np.ndarray] = [np.zeros(0, dtype=np.float32)] * count
    for batches, values in zip(per_rank, trainers.logprobs(per_rank), strict=True):
        for batch, logprobs in zip(batches, values, strict=True):
            for row, index in enumerate(batch.trajectory_index):
                if index != DUMMY:
                    found[index] = logprobs[batch.sequence == row]
    return found


def synchronise(trainers: TrainerGroup, rollouts: RolloutGroup, version: int) -> None:
    """Publish the trainer's weights as `version` and load them into every engine."""
    rollouts.load_weights(version, trainers.publish(version))


def prove(
    trainers: TrainerGroup, rollouts: RolloutGroup, version: int, prompts: list[Prompt], sampling: Sampling,
    config: RLConfig,
) -> Tally:  # fmt: skip
    """Compare engines and trainer on short continuations; also done before the first step.

    Raises:
        ProbeFailed: they disagree by more than the tolerance.
    """
    trajectories = rollouts.probe(prompts, sampling, version)
    ours = trainer_logprobs(trainers, trajectories, version, config.train.max_tokens_per_micro_batch)
    result = compare([t.behavior_logprobs for t in trajectories], ours, tolerance_for(config))
    tally = Tally()
    tally.add("sync/probe_gap_mean", result.mean_gap)
    tally.maximum("sync/probe_gap_max", result.max_gap)
    return tally
