"""The blocks `schedule:`, on when generation and training run, and `failures:`, on processes that die or hang."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from configs.blocks.block import Block


class Schedule(Block):
    """How generation and training alternate. `sync` is staleness 0 of the one loop; `overlap` runs both at once."""

    mode: Literal["sync", "overlap"] = Field(
        "sync",
        description="sync: generate, train, sync weights, in turn and strictly on-policy. overlap: engines go on generating "
        "while the trainer trains, and take new weights in flight.",
    )
    max_staleness: int = Field(
        1,
        ge=1,
        description="With overlap: how many policy versions older than the trained policy a token may be. Groups are only "
        "asked when they can be trained on in time; nothing is generated to be thrown away.",
    )
    in_flight: Literal["recompute", "keep_cache", "drain", "abort"] = Field(
        "recompute",
        description="Responses under way when weights come. recompute: they go on, their cached keys and values made anew. "
        "keep_cache: they go on with the old ones. drain: they are finished first, those of several turns to the end of the "
        "turn. abort: they are cut off and go on afterwards as new requests.",
    )
    over_issue: float | None = Field(
        None,
        ge=0,
        description="With overlap: groups asked beyond the one batch being waited for, in batches. Empty: max_staleness, which "
        "is also the most.",
    )
    pause_while_training: bool = Field(
        False,
        description="With overlap: engines stand still while the trainer works, for devices that both share; unfinished "
        "responses go on in the next step (partial rollouts).",
    )
    replay_buffer_versions: int = Field(
        0, ge=0, description="Groups may be trained on again for this many versions after their first time; 0: never."
    )
    replay_buffer_share: float = Field(
        0.0, ge=0, lt=1, description="Share of every batch taken from such groups, as far as there are any."
    )

    @field_validator("mode", mode="before")
    @classmethod
    def _known_by_another_name(cls, mode: object) -> object:
        if isinstance(mode, str) and mode.lower().startswith("async"):
            raise ValueError(f"asynchronous training is schedule.mode: overlap here, not {mode!r}")
        return mode

    @field_validator("max_staleness", mode="before")
    @classmethod
    def _has_a_mode(cls, versions: object) -> object:
        if versions == 0 and not isinstance(versions, bool):
            raise ValueError("must be at least 1; staleness 0 is schedule.mode: sync")
        return versions

    @property
    def staleness(self) -> int:
        """Return how many versions older a token may be than the policy that it trains; 0 in sync mode."""
        return self.max_staleness if self.mode == "overlap" else 0

    @property
    def oldest(self) -> int:
        """Return the same with groups that are trained on again. 0: every token is of the policy it trains."""
        return self.staleness + self.replay_buffer_versions

    def replayed_groups(self, prompts_per_step: int) -> int:
        """Return how many groups of a batch are trained on again, once the buffer holds so many."""
        return round(self.replay_buffer_share * prompts_per_step)


class Failures(Block):
    """What is done when a process dies or stands still."""

    stall_seconds: float = Field(
        600.0,
        ge=5,
        description="A rank, engine, collective or transfer that has not moved for this long is named, and treated as lost.",
    )
    engine_restarts: int = Field(
        3,
        ge=0,
        description="Rollout engines started again, all together, since the job began or began again; the next one lost stops "
        "the run with a checkpoint.",
    )
    job_restarts: int = Field(
        2, ge=0, description="Times the job begins again from its last checkpoint after a trainer rank was lost."
    )
