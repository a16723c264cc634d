"""What the driver does while it waits, from top to bottom.

The driver never just waits: whatever it waits for, it goes round. One round submits prompts as far as staleness allows,
collects finished groups, replaces engines that are lost and gives the new ones the weights, and checks the weights that
engines have loaded meanwhile. In sync mode there is nothing to submit while the trainer works, and no round is needed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from configs.blocks.rl import RLConfig
from orchestration.cluster.watchdog import Call, EnginesLost, Waiting, Watch
from orchestration.engines.pool import MOMENT_SECONDS, WAIT_SECONDS, EnginePool
from orchestration.engines.requests import AwaitedGroups
from orchestration.metrics.tally import Tally
from orchestration.rl.rollout_queue import Batch, RolloutQueue
from orchestration.rl.weight_probe import compare, probe_sampling, probe_tokens, tolerance_for
from orchestration.rl.weight_sync import SyncError, WeightSync, taken_tally
from orchestration.trainer.ranks import TrainerRanks
from orchestration.trainer.recompute import recompute
from records.rollout import FloatArray, Group, Prompt, Trajectory
from rollouts.worker import GroupRequest

R = TypeVar("R")


class Driver:
    """Keeps engines and trainer at work, and every engine at the trainer's weights."""

    def __init__(
        self, config: RLConfig, trainers: TrainerRanks, pool: EnginePool, queue: RolloutQueue, weights: WeightSync,
        watch: Watch,
    ) -> None:  # fmt: skip
        self.config, self.trainers, self.pool, self.queue, self.weights = config, trainers, pool, queue, weights
        self.watch = watch
        overlaps = config.schedule.mode == "overlap"
        self.syncs_in_flight = overlaps and config.sync.method != "nccl" and not pool.sleeps
        self.tally = Tally()  # of what happened in rounds, until the job takes it
        self.failure: EnginesLost | SyncError | None = (
            None  # of a round beside the trainer; raised when its step is whole
        )
        self._goes_round_beside = False  # while the trainer works
        self._awaited: AwaitedGroups | None = None  # groups of an evaluation
        self._expected: list[FloatArray] | None = None  # the trainer's log-probabilities of what engines are to score

    def take_tally(self) -> Tally:
        """Return what was counted since the last call, by the driver and by the pool about lost engines."""
        tally, self.tally = self.tally, Tally()
        tally.merge(self.pool.tally())
        return tally

    # ---- one round ----

    def go_round(self, wait_seconds: float, submits: bool = True) -> None:
        """Do once what is to be done beside waiting; wait at most so long for a group.

        Raises:
            EnginesLost: more engines died than failures.engine_restarts allows.
            SyncError: an engine refused weights that it took while training went on.
            ProbeFailed: an engine that has loaded does not hold the trainer's weights.
            ValueError: a user's filter or environment failed.
        """
        if submits:
            self.queue.submit(self.weights.version)
        groups = self._collect(wait_seconds)
        if self._awaited is not None:
            groups = self._awaited.take(groups)
        for group in groups:
            self.queue.take_in(group)
        self.weights.give_to_new_engines()
        self._check_loaded()

    def _collect(self, wait_seconds: float) -> list[Group]:
        """Return finished groups; the pool replaces lost engines as it looks for them."""
        if not self.syncs_in_flight:
            return self.pool.collect(wait_seconds)
        with self.weights.refusals():
            return self.pool.collect(wait_seconds if self.is_settled else min(wait_seconds, MOMENT_SECONDS))

    def _check_loaded(self) -> None:
        """Compare what engines have scored under weights that they loaded beside training with what the trainer scored."""
        if self._expected is None:  # nothing was sent, or the trainer is still scoring
            return
        reports = self.pool.take_reports()
        self.tally.merge(taken_tally(reports))
        for report in reports:
            self.tally.merge(compare(report.scored, self._expected, tolerance_for(self.config)))
            self.tally.total("sync/probes", 1)

    # ---- waiting for one thing while everything else goes on ----

    def wait(self, call: Call[R]) -> R:
        """Wait for the trainer and return its answer; in overlap engines are kept at work meanwhile.

        When engines are lost for good in that time, or cannot be brought to new weights, the trainer is let finish before it
        is an error, so that the last checkpoint is of a whole step: that of the batch, which nobody else has any more.
        """
        waiting = Waiting(self.watch, call)
        while not waiting.is_over():
            self.go_round_beside()
        return waiting.answer()

    def go_round_beside(self) -> None:
        """Go round once while the trainer works, in overlap; keep what fails for `raise_failure`."""
        if self._goes_round_beside and self.failure is None:
            with self.trainer_first():
                self.go_round(0.0)

    @contextmanager
    def trainer_first(self) -> Iterator[None]:
        """Keep the loss of engines, or weights they refuse, for `raise_failure`, and let the trainer finish."""
        try:
            yield
        except (EnginesLost, SyncError) as error:
            self.failure = error

    def raise_failure(self) -> None:
        """Raise what was kept while the trainer worked."""
        if self.failure is not None:
            raise self.failure

    def begin_overlap(self) -> None:
        """Keep engines at work beside the trainer from now on, where the schedule is overlap."""
        self._goes_round_beside = self.config.schedule.mode == "overlap"

    def stop(self) -> None:
        """Go round no more beside the trainer: the run ends."""
        self._goes_round_beside = False

    def next_batch(self, version: int) -> Batch:
        """Wait for the batch that the policy of this version will train on. Raise what `go_round` raises."""
        began = time.monotonic()
        while (batch := self.queue.take(version)) is None:
            self.go_round(WAIT_SECONDS)
        if self.config.schedule.mode == "overlap":
            self.tally.total("schedule/trainer_wait_seconds", time.monotonic() - began)
        return batch

    def generate(self, requests: list[GroupRequest]) -> list[Group]:
        """Wait for the groups of these requests, which are no part of training, and return them in this order. Nothing else
        is submitted meanwhile. Raise what `go_round` raises."""
        self._awaited = AwaitedGroups(requests)
        self.pool.submit(requests)
        while not self._awaited.is_complete:
            self.go_round(WAIT_SECONDS, submits=False)
        groups, self._awaited = self._awaited.groups, None
        return groups

    # ---- weights ----

    def send_weights(self, version: int, batch: Batch) -> None:
        """Bring the engines to the trainer's weights. In flight the trainer goes on as soon as they are published, and the
        engines take and check them while it trains. Otherwise engines hold them afterwards; `probe` has to check.

        Raises:
            SyncError, ProbeFailed, EnginesLost.
        """
        if not self.syncs_in_flight:
            self.tally.merge(self.weights.push(version))
            return
        self.settle()
        notice, sent = self.weights.publish(version)
        self.tally.merge(sent)
        sync, self._expected = self.config.sync, None
        longest = self.config.data.max_prompt_tokens + self.config.rollout.max_new_tokens - 1  # scoring makes one more
        trained = [t for group in batch.groups for t in group.trained]
        tokens = probe_tokens(trained, sync.probe_prompts, sync.probe_tokens, longest)
        self.pool.take_reports()  # of new engines that had nothing to score
        self.pool.begin_load(version, notice, [(t.prompt_ids, t.token_ids) for t in tokens])
        self._expected = self._trainer_logprobs(tokens, temperature=1.0)
        self.raise_failure()

    @property
    def is_settled(self) -> bool:
        """Whether engines hold what was sent last, and have shown it."""
        return not self.pool.is_loading and (self._expected is None or not self.pool.has_reports)

    def settle(self) -> None:
        """Wait until engines hold what was sent last. Raise what `go_round` raises."""
        if self.is_settled:
            return
        began = time.monotonic()
        while not self.is_settled:
            self.go_round(MOMENT_SECONDS, submits=False)
        self.tally.total("schedule/trainer_wait_seconds", time.monotonic() - began)

    def probe(self, version: int, prompts: list[Prompt]) -> None:
        """Compare engines and trainer on short continuations of these prompts. Raise ProbeFailed, EnginesLost."""
        while not (trajectories := self.pool.probe(prompts, probe_sampling(self.config), version)):
            self.go_round(WAIT_SECONDS, submits=False)  # all engines are being replaced
        trainer = self._trainer_logprobs(trajectories)
        self.tally.merge(compare([t.behavior_logprobs for t in trajectories], trainer, tolerance_for(self.config)))
        self.tally.total("sync/probes", len(trajectories) / len(prompts))

    def _trainer_logprobs(
        self, trajectories: Sequence[Trajectory], temperature: float | None = None
    ) -> list[FloatArray]:
        budget = self.config.train.max_tokens_per_micro_batch
        call = recompute(self.trainers, list(trajectories), ["old_logprobs"], budget, False, temperature)
        return self.wait(call)["old_logprobs"]
