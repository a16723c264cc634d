"""A weight sync of which only the first half keeps the trainer: once the weights are published it trains on, while engines load
them and prove that they hold them.

The proof cannot be the one of sync mode, for which the trainer scores what engines have sampled with the new weights: by then its
own have moved. So the trainer scores tokens of the last batch before it goes on, and engines score the same tokens when they have
loaded.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from configs.schema import RLConfig
from orchestration.frozen import frozen_columns
from orchestration.metrics import Tally
from orchestration.probe import compare, tolerance_for
from orchestration.rollout_group import RolloutGroup
from orchestration.sync import WeightSync
from orchestration.trainer_actor import TrainerGroup
from rollouts.records import FloatArray, Trajectory


class InFlightSync:
    """Pushes versions one after the other; `turn` sees each of them through."""

    def __init__(self, config: RLConfig, weights: WeightSync, trainers: TrainerGroup, rollouts: RolloutGroup) -> None:
        self.config, self.weights, self.trainers, self.rollouts = config, weights, trainers, rollouts
        self._expected: list[FloatArray] | None = None  # of engines, while they load: the trainer's log-probabilities

    @property
    def is_settled(self) -> bool:
        """Engines hold what was pushed last, and have proven it."""
        return self._expected is None

    def push(self, version: int, trajectories: Sequence[Trajectory]) -> Tally:
        """Publish the trainer's weights, score tokens of these trajectories with them, and let engines begin to load. The version
        before must be settled.

        Raises: SyncError.
        """
        assert self.is_settled, "the version before is not settled"
        notice, tally = self.weights.publish(version)
        sync = self.config.sync
        longest = self.config.data.max_prompt_tokens + self.config.rollout.max_new_tokens - 1  # scoring makes one more
        tokens = probe_tokens(trajectories, sync.probe_prompts, sync.probe_tokens, longest)
        self.rollouts.begin_load(version, notice, [(t.prompt_ids, t.token_ids) for t in tokens])
        budget = self.config.train.max_tokens_per_micro_batch
        ours = frozen_columns(self.trainers, tokens, ["old_logprobs"], version, budget, False, temperature=1.0)
        self._expected = ours["old_logprobs"]
        return tally

    def turn(self) -> Tally:
        """Go on, without waiting, with what `push` began; call it whenever groups were collected, which sees loads through.

        Raises: ProbeFailed.
        """
        expected, tally = self._expected, Tally()
        if expected is None or self.rollouts.is_loading:
            return tally
        self._expected = None
        for report in self.rollouts.load_reports:  # an engine that was lost is proven with the next version
            result = compare(report.scored, expected, tolerance_for(self.config))
            tally.maximum("sync/pause_seconds", report.pause_seconds)
            tally.add("sync/probe_gap_mean", result.mean_gap)
            tally.maximum("sync/probe_gap_max", result.max_gap)
        return tally

    def settle(self) -> Tally:
        """Wait until engines hold what was pushed last. Raises: ProbeFailed, EnginesLost."""
        tally, began = Tally(), time.monotonic()
        if self.is_settled:
            return tally
        while not self.is_settled:
            with self.weights.refusals():
                self.rollouts.wait_a_moment()
            tally.merge(self.turn())
        tally.total("schedule/trainer_wait_seconds", time.monotonic() - began)
        return tally


def probe_tokens(trajectories: Sequence[Trajectory], count: int, tokens: int, longest: int) -> list[Trajectory]:
    """The first generated tokens of `count` trajectories of different groups, as far as there are so many.

    longest: of prompt and tokens together; the prompt's beginning is left out where it would be more, which changes what is
    compared, but not that both sides compute the same.
    """
    chosen = {t.group_id: t for t in reversed(trajectories) if t.action_tokens}
    return [first_tokens(t, tokens, longest) for t in list(chosen.values())[-count:]]


def first_tokens(trajectory: Trajectory, tokens: int, longest: int) -> Trajectory:
    """A trajectory cut short, before an environment's first observation."""
    turn = int(np.argmin(trajectory.is_action)) if not trajectory.is_action.all() else len(trajectory.is_action)
    end = min(tokens, turn)
    cut = {
        name: getattr(trajectory, name)[:end]
        for name in ("token_ids", "behavior_logprobs", "versions", "is_action", "turn")
    }
    prompt_ids = trajectory.prompt_ids[max(0, len(trajectory.prompt_ids) + end - longest) :]
    return dataclasses.replace(trajectory, **cut, prompt_ids=prompt_ids)
