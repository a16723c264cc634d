"""What the trainer is fed: prompts are asked as far as staleness allows; finished groups are collected, filtered and handed
over in batches. Sync mode is staleness 0: a step's groups are asked together and taken together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from configs.blocks.rl import RLConfig
from data_feeds.prompts.sampler import PromptSampler
from orchestration.engines.pool import WAIT_SECONDS, EnginePool
from orchestration.engines.requests import step_requests
from orchestration.metrics.tally import Tally
from orchestration.trainer.rl_batches import drops_zero_advantage
from orchestration.trainer.token_objective import TokenObjective
from records.rollout import Group, Prompt, Trajectory
from rollouts.admission import Admission
from rollouts.filter import apply_filters, filters_of
from rollouts.replay_buffer import ReuseBuffer
from rollouts.vllm.sampling import Sampling


@dataclass(frozen=True)
class Batch:
    """What one step trains on, and what else has finished since the last one."""

    fresh: list[Group]  # in order of asking; those that a filter left out without a replacement are among them
    withdrawn: list[Group]  # left out whole by a filter that refills, in order of asking
    reused: list[Group]  # trained on before

    @property
    def groups(self) -> list[Group]:
        """What goes to the trainer; `Group.trained` says what of it is in the loss. Reused groups lie evenly among fresh ones,
        so that each of a step's updates gets its share."""
        placed = [((n + 0.5) / len(part), group) for part in (self.fresh, self.reused) for n, group in enumerate(part)]
        return [group for _, group in sorted(placed, key=lambda pair: pair[0])]

    @property
    def finished(self) -> list[Group]:
        """What was generated for this step."""
        return [*self.fresh, *self.withdrawn]

    @property
    def trajectories(self) -> list[Trajectory]:
        """Those of `finished`."""
        return [t for group in self.finished for t in group.trajectories]


@dataclass
class _Step:
    """What has happened since the last batch was taken."""

    asked: list[Prompt] = field(default_factory=list)
    withdrawn: list[Group] = field(default_factory=list)
    refilled: int = 0  # withdrawn groups in whose place another was, or is to be, asked
    unfilled: int = 0  # those above rollout.max_refill_rounds: batches are smaller by them, this one or later ones
    missing: int = 0  # groups that the batch was smaller by
    ready: int = 0  # groups that were finished and stayed, when the batch was taken
    running: int = 0  # groups that were not finished then
    waited: float = 0.0  # seconds for the batch


class RolloutQueue:
    """Asks prompts and hands over batches. `note` tells the user something, once."""

    def __init__(
        self, config: RLConfig, objective: TokenObjective, rollouts: EnginePool, sampler: PromptSampler,
        sampling: Sampling, note: Callable[[str], None],
    ) -> None:  # fmt: skip
        rollout, schedule = config.rollout, config.schedule
        self.rollout, self.schedule, self.steps = rollout, schedule, config.train.steps
        self.rollouts, self.sampler, self.sampling, self.note = rollouts, sampler, sampling, note
        self.filters = filters_of(rollout.filters)
        prompts = rollout.prompts_per_step
        self.reuse = ReuseBuffer(schedule.replay_buffer_versions, schedule.reused_groups(prompts), config.run.seed)
        self._drops_zero_advantage = drops_zero_advantage(objective, config.train)
        self._in_training: tuple[int, list[Group]] = (0, [])  # version and fresh groups of the batch taken last
        self.admission = Admission.of(schedule, prompts)
        self.fresh_per_step = self.admission.batch_groups
        self.next_step = 1  # whose batch is taken next
        self.first_to_ask: list[Prompt] = []  # before any from the sampler
        self._asked: dict[str, tuple[int, Prompt]] = {}  # by group id, until trained on or left out: place in the order
        self._count = 0
        self._finished: dict[str, Group] = {}
        self._now = _Step()
        self._said_missing = False

    def begin_after(self, step: int, first_to_ask: list[Prompt]) -> None:
        """Go on after a step of an earlier process: these prompts come first, since they were asked and not trained on."""
        self.next_step, self.first_to_ask = step + 1, list(first_to_ask)

    def turn(self, engine_version: int, wait_seconds: float = 0.0) -> None:
        """Ask as many prompts as may be asked now, and take in what has finished; waits at most that long for the first.

        engine_version: what engines begin under, the policy's or an older one: they hold it, or it is on its way.

        Raises:
            EnginesLost: more engines died than failures.engine_restarts allows.
            ValueError: a user's filter or environment failed.
        """
        self._ask(engine_version)
        for group in self.rollouts.collect(wait_seconds):
            self._take_in(group)

    def take(self, version: int, turn: Callable[[float], None] | None = None) -> Batch:
        """The next step's batch, once it is complete.

        version: of the policy that will train on it. turn(wait_seconds): what is done until then; None: as `turn`, with engines
        that hold that version. Raises: as `turn`.
        """
        began = time.monotonic()
        while (ids := self._complete(version)) is None:
            assert not self._is_stuck(version), "nothing is under way, nothing may be asked, and there is no batch"
            if turn is None:
                self.turn(version, WAIT_SECONDS)
            else:
                turn(WAIT_SECONDS)
        self._now.waited = time.monotonic() - began
        fresh = [self._finished.pop(name) for name in self._in_order(ids)]
        self._refuse_old_tokens(fresh, version)
        reused = self.reuse.take(version)
        withdrawn = sorted(self._now.withdrawn, key=lambda group: self._asked[group.group_id][0])
        for group in (*fresh, *withdrawn):
            del self._asked[group.group_id]
        batch, self._in_training = Batch(fresh, withdrawn, reused), (version, fresh)
        self.sampler.observe(batch.finished)
        self._now.ready, self._now.running = self.admission.ready, self.admission.running
        self._now.missing = self.fresh_per_step - len(fresh)
        self._say_missing()
        self.last, self._now = self._now, _Step()
        self._replace(self.last.unfilled - self.last.missing)
        self.next_step += 1
        return batch

    def trained(self, version: int) -> None:
        """The last batch is trained on, and the policy is at `version`."""
        self.admission.trained(version)
        at, groups = self._in_training
        self.reuse.add([group for group in groups if self._is_of_use_again(group)], at)

    def unfinished(self) -> list[Prompt]:
        """Prompts taken from the sampler whose groups are not trained on yet, in order of asking. In sync mode with those that were
        left out in the step under way, which is done again as it was; in overlap that step will be another one anyhow."""
        left_out = {group.group_id for group in self._now.withdrawn} if self.schedule.staleness else set()
        asked = sorted(
            (entry for name, entry in self._asked.items() if name not in left_out), key=lambda entry: entry[0]
        )
        return [prompt for _, prompt in asked] + self.first_to_ask

    def _ask(self, version: int) -> None:
        count = self._may_ask(version)
        if count == 0:
            return
        prompts = self.first_to_ask[:count]
        del self.first_to_ask[:count]
        prompts += self.sampler.next(count - len(prompts))
        samples, label = self.rollout.responses_per_prompt, f"train-{self.next_step}"
        requests = step_requests(prompts, samples, label, self._now.asked, oldest_version=version)
        self._now.asked += prompts
        for request in requests:
            self.admission.asked(request.group_id, version)
            self._asked[request.group_id] = (self._count, request.prompt)
            self._count += 1
        self.rollouts.ask(requests, self.sampling, self.next_step)

    def _may_ask(self, version: int) -> int:
        """How many prompts may be asked now, of those that a step is left for."""
        still_needed = (self.steps - self.next_step + 1) * self.fresh_per_step - self.admission.outstanding
        return max(0, min(self.admission.room(version), still_needed) - self._now.unfilled)

    def _take_in(self, group: Group) -> None:
        (left_out_by,) = apply_filters(self.filters, [group])
        if left_out_by is None or not left_out_by.refill:
            self._finished[group.group_id] = group
            self.admission.finished(group.group_id)
            return
        self.admission.withdrawn(group.group_id)
        self._now.withdrawn.append(group)
        self._replace(1)

    def _replace(self, groups: int) -> None:
        """Have further prompts asked in place of so many, as far as this step may still ask any."""
        allowed = min(groups, self.rollout.max_refill_rounds * self.rollout.prompts_per_step - self._now.refilled)
        self._now.refilled += allowed
        self._now.unfilled += groups - allowed

    def _complete(self, version: int) -> list[str] | None:
        """The batch of as many as are finished, without waiting for those that are not asked any more; but for one group at
        least, as long as any may come."""
        may_come = self.admission.outstanding > 0 or self._may_ask(version) > 0
        return self.admission.batch(version, max(int(may_come), self.fresh_per_step - self._now.unfilled))

    def _is_stuck(self, version: int) -> bool:
        """Whether waiting would be for ever: a fault of ours."""
        return self.admission.running == 0 and self._may_ask(version) == 0

    def _is_of_use_again(self, group: Group) -> bool:
        """Whether it gave a gradient, and would again: not when all its advantages are 0 and so in no forward pass, and not
        when one is Inf or NaN, which has its update skipped each time."""
        found = [t.advantage for t in group.trained]
        is_sound = all(math.isfinite(advantage) for advantage in found if advantage is not None)
        return is_sound and not (self._drops_zero_advantage and all(advantage == 0 for advantage in found))

    def _refuse_old_tokens(self, groups: list[Group], version: int) -> None:
        """The bound that admission keeps by deadlines, of the tokens themselves."""
        for group in groups:
            for t in group.trajectories:
                assert not len(t.versions) or version - t.versions.min() <= self.schedule.staleness, (
                    f"{group.group_id} has tokens of version {t.versions.min()}, too old for version {version}"
                )

    def _in_order(self, ids: list[str]) -> list[str]:
        return sorted(ids, key=lambda name: self._asked[name][0])

    def _say_missing(self) -> None:
        if self._now.missing and not self._said_missing:
            self._said_missing = True
            self.note(
                f"step {self.next_step}: {self._now.missing} of {self.fresh_per_step} groups are missing after "
                f"{self._now.refilled} further prompts (rollout.max_refill_rounds); the step trains on fewer. Said once; "
                "rollout/unfilled_groups counts them."
            )

    def tally(self, batch: Batch, version: int) -> Tally:
        """Counters of filters, reuse and buffers at the moment the batch was taken, to be trained on at `version`."""
        tally = Tally()
        if self.filters:
            self._tally_filters(batch, tally)
        if self.schedule.oldest > 0:
            tally.total("schedule/version", version)
            tally.add("schedule/reused_share", len(batch.reused), len(batch.groups))
        if self.schedule.mode == "overlap":
            tally.total("schedule/ready_groups", self.last.ready)
            tally.total("schedule/running_groups", self.last.running)
            tally.total("schedule/trainer_wait_seconds", self.last.waited)
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
            tally.total("rollout/refilled_groups", self.last.refilled)
            tally.total("rollout/unfilled_groups", self.last.missing)
