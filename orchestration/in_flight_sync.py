"""A weight sync of which only the first half keeps the trainer: once the weights are published it trains on, while engines load
them and prove that they hold them.

The proof cannot be the one of sync mode, for which the trainer scores what engines have sampled with the new weights: by then its
own have moved. So the trainer scores tokens of the last batch before it goes on, and engines score the same tokens when they have
loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from configs.schema import RLConfig
from orchestration.frozen import frozen_columns
from orchestration.metrics import Tally
from orchestration.probe import compare, tolerance_for
from orchestration.rollout_group import RolloutGroup
from orchestration.sync import WeightSync
from orchestration.trainer_actor import TrainerGroup
from orchestration.watchdog import EngineLost
from rollouts.records import FloatArray, Trajectory


@dataclasses.dataclass
class _Proof:
    """What is still to be shown of a version."""

    version: int
    tokens: list[Trajectory]
    expected: list[FloatArray]  # the trainer's log-probabilities, at temperature 1
    scoring: list[Any] | None = None  # futures of engines' own; None: they are still loading


class InFlightSync:
    """Pushes versions one after the other; `turn` sees each of them through."""

    def __init__(self, config: RLConfig, weights: WeightSync, trainers: TrainerGroup, rollouts: RolloutGroup) -> None:
        self.config, self.weights, self.trainers, self.rollouts = config, weights, trainers, rollouts
        self.engine_version = 0  # under which what is asked now begins: engines hold it, or it is on its way to them
        self._proof: _Proof | None = None

    @property
    def is_settled(self) -> bool:
        """Engines hold what was pushed last, and have proven it."""
        return self._proof is None

    def push(self, version: int, trajectories: Sequence[Trajectory]) -> Tally:
        """Publish the trainer's weights, score tokens of these trajectories with them, and let engines begin to load. The version
        before must be settled.

        Raises: SyncError.
        """
        assert self._proof is None, "the version before is not settled"
        notice, tally = self.weights.publish(version)
        self.rollouts.begin_load(version, notice)
        self.engine_version = version
        longest = self.config.data.max_prompt_tokens + self.config.rollout.max_new_tokens
        sync = self.config.sync
        tokens = probe_tokens(
            trajectories, sync.probe_prompts, sync.probe_tokens, longest - 1
        )  # scoring makes one more
        budget = self.config.train.max_tokens_per_micro_batch
        ours = frozen_columns(self.trainers, tokens, ["old_logprobs"], version, budget, False, temperature=1.0)
        self._proof = _Proof(version, tokens, ours["old_logprobs"])
        return tally

    def turn(self) -> Tally:
        """Go on, without waiting, with what `push` began; call it whenever groups were collected, which sees loads through.

        Raises: ProbeFailed.
        """
        proof, tally = self._proof, Tally()
        if proof is None or self.rollouts.is_loading:
            return tally
        if proof.scoring is None:
            if reports := self.rollouts.load_reports:
                tally.maximum("sync/pause_seconds", max(report.pause_seconds for report in reports))
            asked = [(t.prompt_ids, t.token_ids) for t in proof.tokens]
            proof.scoring = [actor.score.remote(asked) for actor in self.rollouts.loaded_actors]
        if ray.wait(proof.scoring, num_returns=len(proof.scoring), timeout=0)[1] if proof.scoring else False:
            return tally
        self._proof = None
        return tally.merge(self._judged(proof))

    def settle(self) -> Tally:
        """Wait until engines hold what was pushed last. Raises: ProbeFailed, EnginesLost."""
        tally = Tally()
        while self._proof is not None and self._proof.scoring is None:
            with self.weights.refusals():
                self.rollouts.wait_a_moment()
            tally.merge(self.turn())
        proof, self._proof = self._proof, None
        return tally if proof is None else tally.merge(self._judged(proof))

    def _judged(self, proof: _Proof) -> Tally:
        assert proof.scoring is not None
        tally = Tally()
        for future in proof.scoring:
            try:
                (found,) = self.rollouts.watch.get([future], f"prove version {proof.version}")
            except EngineLost:
                continue  # it is replaced, and proven with the next version
            result = compare(found, proof.expected, tolerance_for(self.config))
            tally.add("sync/probe_gap_mean", result.mean_gap)
            tally.maximum("sync/probe_gap_max", result.max_gap)
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
