"""One synchronisation: publish the trainer's weights, load them into every engine, prove that the engines hold them."""

from __future__ import annotations

from configs.schema import RLConfig
from orchestration.frozen import frozen_columns
from orchestration.metrics import Tally
from orchestration.probe import compare, tolerance_for
from orchestration.rollout_group import RolloutGroup
from orchestration.trainer_actor import TrainerGroup
from rollouts.records import Prompt
from rollouts.sampling import Sampling


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
    budget = config.train.max_tokens_per_micro_batch
    ours = frozen_columns(trainers, trajectories, ["old_logprobs"], version, budget, share_prompts=False)
    result = compare([t.behavior_logprobs for t in trajectories], ours["old_logprobs"], tolerance_for(config))
    tally = Tally()
    tally.add("sync/probe_gap_mean", result.mean_gap)
    tally.maximum("sync/probe_gap_max", result.max_gap)
    return tally
