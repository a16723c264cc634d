"""The queue between engines and trainer: it submits prompts as far as staleness allows, filters finished groups and
returns them in batches. Sync mode is staleness 0: a step's groups are submitted together and taken together.

Nothing here waits: `rl/driver.py` calls `submit`, `take_in` and `take`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from configs.blocks.rl import RLConfig
from data_feeds.prompts.sampler import ShuffledPrompts
from orchestration.engines.pool import EnginePool
from orchestration.engines.requests import step_requests
from orchestration.metrics.tally import Tally
from orchestration.trainer.rl_batches import drops_zero_advantage
from orchestration.trainer.token_objective import TokenObjective
from records.rollout import Group, Prompt, Trajectory
from rollouts.admission import Admission
from rollouts.filter import apply_filters, filters_of
from rollouts.replay_buffer import ReplayBuffer
from rollouts.vllm.sampling import Sampling


@dataclass(frozen=True)
class Batch:
    """The groups that one step trains on, and those that a filter has left out since the last step."""

    fresh: list[Group]  # in order of submission; those that a filter left out without a replacement are among them
    cancelled: list[Group]  # left out whole by a filter that refills, in order of submission
    replayed: list[Group]  # trained on before

    @property
    def groups(self) -> list[Group]:
        """Return the groups for the trainer; `Group.trained` are their responses in the loss. Replayed groups lie
        evenly among fresh ones, so that each of a step's updates gets its share."""
        placed = [
            ((n + 0.5) / len(part), group) for part in (self.fresh, self.replayed) for n, group in enumerate(part)
        ]
        return [group for _, group in sorted(placed, key=lambda pair: pair[0])]

    @property
    def finished(self) -> list[Group]:
        """Return the groups that were generated for this step."""
        return [*self.fresh, *self.cancelled]

    @property
    def trajectories(self) -> list[Trajectory]:
        """Return all responses that were generated for this step."""
        return [t for group in self.finished for t in group.trajectories]


@dataclass
class _Step:
    """The events since the last batch was taken."""

    submitted: list[Prompt] = field(default_factory=list)
    cancelled: list[Group] = field(default_factory=list)
    refilled: int = 0  # cancelled groups in whose place another was, or is to be, submitted
    unfilled: int = 0  # those above rollout.max_refill_rounds: batches are smaller by them, this one or later ones
    missing: int = 0  # groups that the batch was smaller by
    ready: int = 0  # groups that were finished and stayed, when the batch was taken
    running: int = 0  # groups that were not finished then


class RolloutQueue:
    """Submit prompts and return batches."""

    def __init__(
        self, config: RLConfig, objective: TokenObjective, pool: EnginePool, sampler: ShuffledPrompts,
        sampling: Sampling, note: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Begin with an empty queue. note: shows a sentence to the user."""
        rollout, schedule = config.rollout, config.schedule
        self.rollout, self.schedule, self.steps = rollout, schedule, config.train.steps
        self.pool, self.sampler, self.sampling, self.note = pool, sampler, sampling, note
        self.filters = filters_of(rollout.filters)
        prompts = rollout.prompts_per_step
        self.replay_buffer = ReplayBuffer(
            schedule.replay_buffer_versions, schedule.replayed_groups(prompts), config.run.seed
        )
        self._drops_zero_advantage = drops_zero_advantage(objective, config.train)
        self._in_training: tuple[int, list[Group]] = (0, [])  # version and fresh groups of the batch taken last
        self.admission = Admission.of(schedule, prompts)
        self.fresh_per_step = self.admission.batch_groups
        self.next_step = 1  # whose batch is taken next
        self.first_prompts: list[Prompt] = []  # submitted before any from the sampler
        self._submitted: dict[
            str, tuple[int, Prompt]
        ] = {}  # by group id, until trained on or left out: place in the order
        self._count = 0
        self._finished: dict[str, Group] = {}
        self._now = self._last = _Step()
        self._said_missing = False

    def begin_after(self, step: int, first_prompts: list[Prompt]) -> None:
        """Continue after a step of an earlier process: its prompts that were not trained on come first."""
        self.next_step, self.first_prompts = step + 1, list(first_prompts)

    def submit(self, engine_version: int) -> None:
        """Submit as many prompts as staleness allows now.

        engine_version: the policy's version or an older one, under which engines begin: they hold it, or will get it.
        """
        count = self._room(engine_version)
        if count == 0:
            return
        prompts = self.first_prompts[:count]
        del self.first_prompts[:count]
        prompts += self.sampler.next(count - len(prompts))
        samples, earlier = self.rollout.responses_per_prompt, self._now.submitted
        requests = step_requests(
            prompts, samples, self.sampling, self.next_step, "train", earlier, oldest_version=engine_version
        )
        self._now.submitted += prompts
        for request in requests:
            self.admission.submitted(request.group_id, engine_version)
            self._submitted[request.group_id] = (self._count, request.prompt)
            self._count += 1
        self.pool.submit(requests)

    def take_in(self, group: Group) -> None:
        """Keep a finished group until it is in a batch, unless a filter that refills leaves it out; then replace it.

        Raises:
            ValueError: a user's filter failed.
        """
        (left_out_by,) = apply_filters(self.filters, [group])
        if left_out_by is None or not left_out_by.refill:
            self._finished[group.group_id] = group
            self.admission.finished(group.group_id)
            return
        self.admission.cancelled(group.group_id)
        self._now.cancelled.append(group)
        self._replace(1)

    def take(self, version: int) -> Batch | None:
        """Return the next step's batch, for a policy of this version, or None while the batch is not complete."""
        ids = self._complete(version)
        if ids is None:
            assert not self._is_stuck(version), "nothing is under way, nothing may be submitted, and there is no batch"
            return None
        fresh = [self._finished.pop(name) for name in self._in_order(ids)]
        self._refuse_old_tokens(fresh, version)
        replayed = self.replay_buffer.take(version)
        cancelled = sorted(self._now.cancelled, key=lambda group: self._submitted[group.group_id][0])
        for group in (*fresh, *cancelled):
            del self._submitted[group.group_id]
        batch, self._in_training = Batch(fresh, cancelled, replayed), (version, fresh)
        self.sampler.observe(batch.finished)
        self._now.ready, self._now.running = self.admission.ready, self.admission.running
        self._now.missing = self.fresh_per_step - len(fresh)
        self._say_missing()
        self._last, self._now = self._now, _Step()
        self._replace(self._last.unfilled - self._last.missing)
        self.next_step += 1
        return batch

    def trained(self, version: int) -> None:
        """Note that the last batch was trained on and the policy is at `version`."""
        self.admission.trained(version)
        at, groups = self._in_training
        self.replay_buffer.add([group for group in groups if self._is_of_use_again(group)], at)

    def unfinished(self) -> list[Prompt]:
        """Return the prompts taken from the sampler whose groups are not trained on yet, in order of submission. In
        sync mode these include the ones left out in the current step, because a resumed run repeats it unchanged; in
        overlap mode it is a different step anyway."""
        left_out = {group.group_id for group in self._now.cancelled} if self.schedule.staleness else set()
        entries = (entry for name, entry in self._submitted.items() if name not in left_out)
        return [prompt for _, prompt in sorted(entries, key=lambda entry: entry[0])] + self.first_prompts

    def _room(self, version: int) -> int:
        """Return how many prompts may be submitted now and are needed by the remaining steps."""
        still_needed = (self.steps - self.next_step + 1) * self.fresh_per_step - self.admission.outstanding
        return max(0, min(self.admission.room(version), still_needed) - self._now.unfilled)

    def _replace(self, groups: int) -> None:
        """Let this number of further prompts be submitted, or fewer when the step's limit on refills is reached."""
        allowed = min(groups, self.rollout.max_refill_rounds * self.rollout.prompts_per_step - self._now.refilled)
        self._now.refilled += allowed
        self._now.unfilled += groups - allowed

    def _complete(self, version: int) -> list[str] | None:
        """Return the ids of a batch of finished groups, or None. It may be smaller by the groups that are not submitted
        any more, but has at least one group as long as any may come."""
        may_come = self.admission.outstanding > 0 or self._room(version) > 0
        return self.admission.batch(version, max(int(may_come), self.fresh_per_step - self._now.unfilled))

    def _is_stuck(self, version: int) -> bool:
        """Return whether a wait would never end, which would be an error of this code."""
        return self.admission.running == 0 and self._room(version) == 0

    def _is_of_use_again(self, group: Group) -> bool:
        """Return whether the group gave a gradient and would give one again: not when all its advantages are 0 and left
        out of forward passes, nor when one is Inf or NaN, so that its update is skipped each time."""
        advantages = [t.advantage for t in group.trained]
        is_sound = all(math.isfinite(advantage) for advantage in advantages if advantage is not None)
        return is_sound and not (self._drops_zero_advantage and all(advantage == 0 for advantage in advantages))

    def _refuse_old_tokens(self, groups: list[Group], version: int) -> None:
        """Check on the tokens themselves the bound that admission keeps by deadlines."""
        for group in groups:
            for t in group.trajectories:
                assert not len(t.versions) or version - t.versions.min() <= self.schedule.staleness, (
                    f"{group.group_id} has tokens of version {t.versions.min()}, too old for version {version}"
                )

    def _in_order(self, ids: list[str]) -> list[str]:
        return sorted(ids, key=lambda name: self._submitted[name][0])

    def _say_missing(self) -> None:
        if self._now.missing and not self._said_missing:
            self._said_missing = True
            self.note(
                f"step {self.next_step}: {self._now.missing} of {self.fresh_per_step} groups are missing after "
                f"{self._now.refilled} further prompts (rollout.max_refill_rounds); the step trains on fewer. Said once; "
                "rollout/unfilled_groups counts them."
            )

    def tally(self, batch: Batch, version: int) -> Tally:
        """Return counters of filters, replay buffer and queue at the moment when the batch for `version` was taken."""
        tally = Tally()
        if self.filters:
            self._tally_filters(batch, tally)
        if self.schedule.oldest > 0:
            tally.total("schedule/version", version)
            tally.add("schedule/replayed_share", len(batch.replayed), len(batch.groups))
        if self.schedule.mode == "overlap":
            tally.total("schedule/ready_groups", self._last.ready)
            tally.total("schedule/running_groups", self._last.running)
            tally.total("rollout/discarded_tokens", 0)  # also when no engine was lost: whoever loses one adds to it
        return tally

    def _tally_filters(self, batch: Batch, tally: Tally) -> None:
        dropped = [t for t in batch.trajectories if t.dropped_by is not None]
        tally.total("rollout/dropped_responses", len(dropped))
        tally.total("rollout/dropped_in_baseline", sum(t.in_baseline for t in dropped))
        tally.total("rollout/filtered_tokens", sum(t.action_tokens for t in dropped))
        tally.total(
            "rollout/filtered_groups",
            sum(bool(g.scored) and all(t.dropped_by is not None for t in g.scored) for g in batch.finished),
        )
        for used in self.filters:
            tally.total(f"rollout/filtered/{used.name}", sum(t.dropped_by == used.name for t in dropped))
        if any(used.refill for used in self.filters):
            tally.total("rollout/refilled_groups", self._last.refilled)
            tally.total("rollout/unfilled_groups", self._last.missing)
