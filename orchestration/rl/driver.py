"""All that the driver does while it waits.

Whatever it waits for, it goes round. One round submits prompts as far as staleness allows, collects finished groups,
replaces engines that are lost, gives the weights to the new ones, and checks the weights that engines have loaded
meanwhile. In sync mode there is nothing to submit while the trainer works, and no round is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
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
from orchestration.run.interruption import Interrupted
from orchestration.trainer.ranks import TrainerRanks
from orchestration.trainer.recompute import recompute
from records.rollout import FloatArray, Group, Prompt, Trajectory
from rollouts.worker import GroupRequest

R = TypeVar("R")


class Driver:
    """Keep engines and trainer at work, and every engine at the trainer's weights."""

    def __init__(
        self, config: RLConfig, trainers: TrainerRanks, pool: EnginePool, queue: RolloutQueue, weights: WeightSync,
        watch: Watch,
    ) -> None:  # fmt: skip
        self.config, self.trainers, self.pool, self.queue, self.weights = config, trainers, pool, queue, weights
        self.watch = watch
        overlaps = config.schedule.mode == "overlap"
        self.syncs_in_flight = overlaps and config.sync.method != "nccl" and not pool.sleeps
        self.tally = Tally()  # of what happened in rounds, until the job takes it
        self.asked: Callable[[], bool] = lambda: False  # whether the run was asked to end
        self.failure: EnginesLost | SyncError | Interrupted | None = (
            None  # of a round beside the trainer; raised when its step is whole
        )
        self._goes_round_beside = False  # while the trainer works
        self._awaited: AwaitedGroups | None = None  # groups of an evaluation
        self._expected: list[FloatArray] | None = None  # the trainer's log-probabilities of what engines are to score

    def take_tally(self) -> Tally:
        """Return the counts since the last call: the driver's, and the pool's about lost engines."""
        tally, self.tally = self.tally, Tally()
        tally.merge(self.pool.tally())
        return tally

    # ---- one round ----

    def go_round(self, wait_seconds: float, submits: bool = True) -> None:
        """Do one round of all work beside waiting; wait at most this long for a group.

        Raises:
            EnginesLost: more engines died than failures.engine_restarts allows.
            SyncError: an engine refused the weights that it was to load during training.
            ProbeFailed: an engine that has loaded does not hold the trainer's weights.
            ValueError: a user's filter or environment failed.
            Interrupted: the run was asked to end.
        """
        if self.asked():
            raise Interrupted
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
        """Return finished groups; while it waits for them, the pool replaces lost engines."""
        if not self.syncs_in_flight:
            return self.pool.collect(wait_seconds)
        with self.weights.refusals():
            return self.pool.collect(wait_seconds if self.is_settled else min(wait_seconds, MOMENT_SECONDS))

    def _check_loaded(self) -> None:
        """Compare the trainer's log-probabilities with those of engines that loaded weights during training."""
        if self._expected is None:  # nothing was sent, or the trainer is still scoring
            return
        reports = self.pool.take_reports()
        self.tally.merge(taken_tally(reports))
        for report in reports:
            self.tally.merge(compare(report.scored, self._expected, tolerance_for(self.config)))
            self.tally.total("sync/probes", 1)

    # ---- waiting for one thing while everything else goes on ----

    def wait(self, call: Call[R]) -> R:
        """Wait for the trainer and return its answer; in overlap mode, keep engines at work meanwhile.

        When engines are lost for good in that time, or cannot load new weights, the trainer finishes first and the
        error is raised later. So the last checkpoint is of a whole step with this batch, which exists nowhere else.
        """
        waiting = Waiting(self.watch, call)
        while not waiting.is_over():
            self.go_round_beside()
        return waiting.answer()

    def go_round_beside(self) -> None:
        """Go round once while the trainer works, in overlap mode; keep an error for `raise_failure`."""
        if self._goes_round_beside and self.failure is None:
            with self.trainer_first():
                self.go_round(0.0)

    @contextmanager
    def trainer_first(self) -> Iterator[None]:
        """Keep an error of the block (lost engines, refused weights) for `raise_failure`, after the trainer's step."""
        try:
            yield
        except (EnginesLost, SyncError, Interrupted) as error:
            self.failure = error

    def raise_failure(self) -> None:
        """Raise the error that was kept while the trainer worked, if any."""
        if self.failure is not None:
            raise self.failure

    def begin_overlap(self) -> None:
        """Keep engines at work beside the trainer from now on, if the schedule is overlap."""
        self._goes_round_beside = self.config.schedule.mode == "overlap"

    def stop(self) -> None:
        """End the rounds beside the trainer, because the run ends."""
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
        """Wait for the groups of these requests, which are not for training, and return them in this order. Submit
        nothing else meanwhile. Raise what `go_round` raises."""
        self._awaited = AwaitedGroups(requests)
        self.pool.submit(requests)
        while not self._awaited.is_complete:
            self.go_round(WAIT_SECONDS, submits=False)
        groups, self._awaited = self._awaited.groups, None
        return groups

    # ---- weights ----

    def send_weights(self, version: int, batch: Batch) -> None:
        """Bring the engines to the trainer's weights. In flight, return when they are published; engines load and check
        them during the next training step. Otherwise return when engines hold them, which `probe` must check.

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
        """Return whether engines hold the weights that were sent last, and whether this was checked."""
        return not self.pool.is_loading and (self._expected is None or not self.pool.has_reports)

    def settle(self) -> None:
        """Wait until engines hold the weights that were sent last. Raise what `go_round` raises."""
        if self.is_settled:
            return
        began = time.monotonic()
        while not self.is_settled:
            self.go_round(MOMENT_SECONDS, submits=False)
        self.tally.total("schedule/trainer_wait_seconds", time.monotonic() - began)

    def probe(self, version: int, prompts: list[Prompt]) -> None:
        """Compare engines and trainer on short continuations of these prompts. Raise ProbeFailed or EnginesLost."""
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
