"""A step's groups: asked, filtered, and further ones asked in place of those that a refilling filter left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from configs.schema import RLConfig
from data_feeds.sampler import PromptSampler
from orchestration.metrics import Tally
from orchestration.rollout_group import RolloutGroup, Rollouts
from rollouts.filter import GroupFilter, apply_filters, filters_of
from rollouts.records import Group, Prompt
from rollouts.sampling import Sampling


@dataclass(frozen=True)
class _Round:
    """One round of askings, its groups marked by the filters."""

    made: Rollouts
    left_out: list[GroupFilter | None]  # per group, the filter that left it out whole

    @property
    def missing(self) -> int:
        """Groups in whose place further prompts are wanted."""
        return sum(by is not None and by.refill for by in self.left_out)


class StepFeed:
    """Asks each step's prompts. `note` tells the user something, once."""

    def __init__(
        self, config: RLConfig, rollouts: RolloutGroup, sampler: PromptSampler, sampling: Sampling,
        note: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.rollout, self.rollouts, self.sampler, self.sampling = config.rollout, rollouts, sampler, sampling
        self.filters = filters_of(config.rollout.filters)
        self.note = note
        self._said_unfilled = False

    def gather(self, step: int) -> tuple[Rollouts, Tally]:
        """All groups of a step, the filtered ones among them (`Group.trained` says what is left), and the counters.

        A round asks exactly as many prompts as the round before lost to refilling filters, so there is no surplus;
        rollout.max_refill_rounds bounds the rounds.

        Raises:
            ValueError: a user's filter failed.
        """
        asked: list[Prompt] = []
        rounds = [self._round(self.rollout.prompts_per_step, step, asked)]
        while rounds[-1].missing and len(rounds) <= self.rollout.max_refill_rounds:
            rounds.append(self._round(rounds[-1].missing, step, asked))
        if rounds[-1].missing and not self._said_unfilled:
            self._said_unfilled = True
            self.note(
                f"step {step}: {rounds[-1].missing} of {self.rollout.prompts_per_step} groups are missing after "
                f"{len(rounds) - 1} refill rounds (rollout.max_refill_rounds); the step trains on fewer. Said once; "
                "rollout/unfilled_groups counts them."
            )
        made = Rollouts(
            groups=[group for one in rounds for group in one.made.groups],
            generate_seconds=sum(one.made.generate_seconds for one in rounds),
            reward_seconds=sum(one.made.reward_seconds for one in rounds),
        )
        return made, self._tally(made.groups, rounds)

    def _round(self, count: int, step: int, asked: list[Prompt]) -> _Round:
        """Ask `count` further prompts; `asked`, those of the step's earlier rounds, grows by them."""
        prompts = self.sampler.next(count)
        made = self.rollouts.generate(
            prompts, self.rollout.responses_per_prompt, self.sampling, step, "train", earlier=tuple(asked)
        )
        asked += prompts
        self.sampler.observe(made.groups)
        return _Round(made, apply_filters(self.filters, made.groups))

    def _tally(self, groups: list[Group], rounds: list[_Round]) -> Tally:
        tally = Tally()
        if not self.filters:
            return tally
        dropped = [t for group in groups for t in group.trajectories if t.dropped_by is not None]
        tally.total("rollout/dropped_responses", len(dropped))
        tally.total("rollout/dropped_in_baseline", sum(t.in_baseline for t in dropped))
        tally.total("rollout/filtered_groups", sum(by is not None for one in rounds for by in one.left_out))
        for used in self.filters:
            tally.total(f"rollout/filtered/{used.name}", sum(t.dropped_by == used.name for t in dropped))
        if any(used.refill for used in self.filters):
            tally.total("rollout/refill_rounds", len(rounds) - 1)
            tally.total("rollout/refilled_groups", sum(len(one.made.groups) for one in rounds[1:]))
            tally.total("rollout/unfilled_groups", rounds[-1].missing)
        return tally
