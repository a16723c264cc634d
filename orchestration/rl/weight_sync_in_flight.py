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
from typing import Any

import numpy as np

from configs.blocks.rl import RLConfig
from orchestration.engines.pool import EnginePool
from orchestration.metrics.tally import Tally
from orchestration.rl.weight_probe import compare, tolerance_for
from orchestration.rl.weight_sync import WeightSync, taken_tally
from orchestration.trainer.ranks import TrainerRanks
from orchestration.trainer.recompute import recomputed_columns
from records.rollout import FloatArray, Trajectory
from rollouts.vllm.engine import LoadReport, Sequences


class InFlightSync:
    """Pushes versions one after the other; `turn` sees each of them through."""

    def __init__(self, config: RLConfig, weights: WeightSync, trainers: TrainerRanks, rollouts: EnginePool) -> None:
        self.config, self.weights, self.trainers, self.rollouts = config, weights, trainers, rollouts
        self._is_loading = False  # what was pushed last
        self._tokens: list[Trajectory] = []  # that prove what was pushed last
        self._expected: list[FloatArray] | None = None  # of engines: the trainer's log-probabilities of them
        self._brought_up: list[LoadReport] = []  # of engines that were started again, and are not judged yet

    @property
    def is_settled(self) -> bool:
        """Engines hold what was pushed last, and have proven it."""
        return not self._is_loading and not self._brought_up

    def push(self, version: int, trajectories: Sequence[Trajectory]) -> Tally:
        """Publish the trainer's weights, score tokens of these trajectories with them, and let engines begin to load. The version
        before must be settled.

        Raises: SyncError.
        """
        assert self.is_settled, "the version before is not settled"
        notice, tally = self.weights.publish(version)
        sync, self._is_loading, self._expected = self.config.sync, True, None
        longest = self.config.data.max_prompt_tokens + self.config.rollout.max_new_tokens - 1  # scoring makes one more
        self._tokens = probe_tokens(trajectories, sync.probe_prompts, sync.probe_tokens, longest)
        self.rollouts.begin_load(version, notice, self._to_score)
        budget = self.config.train.max_tokens_per_micro_batch
        ours = recomputed_columns(self.trainers, self._tokens, ["old_logprobs"], budget, False, temperature=1.0)
        self._expected = ours["old_logprobs"]
        return tally

    @property
    def _to_score(self) -> Sequences:
        return [(t.prompt_ids, t.token_ids) for t in self._tokens]

    def bring_up(self, actor: Any) -> list[LoadReport] | None:
        """As that of WeightSync; the engine has to prove what it holds as the others did."""
        reports = self.weights.bring_up(actor, self._to_score)
        if self._tokens:
            self._brought_up += reports or []
        return reports

    def turn(self) -> Tally:
        """Go on, without waiting, with what `push` began; call it whenever groups were collected, which sees loads through.

        Raises: ProbeFailed.
        """
        tally = Tally()
        if self._expected is None:  # nothing was pushed, or the trainer is still scoring
            return tally
        reports, self._brought_up = self._brought_up, []
        if self._is_loading and not self.rollouts.is_loading:
            self._is_loading = False
            reports += self.rollouts.load_reports
        tally.merge(taken_tally(reports))
        for report in reports:
            result = compare(report.scored, self._expected, tolerance_for(self.config))
            tally.add("sync/probe_gap_mean", result.mean_gap)
            tally.maximum("sync/probe_gap_max", result.max_gap)
            tally.total("sync/proofs", 1)
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
