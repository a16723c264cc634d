"""The block `placement:`: trainer and engines use the same devices in turn, or have devices of their own."""

from __future__ import annotations

from pydantic import Field

from configs.blocks.block import Block


class Placement(Block):
    """Who gets which GPUs and CPU cores."""

    colocate: bool | None = Field(
        None,
        description="Trainer and engines use the same devices in turn; on a GPU the engine sleeps while the trainer works. "
        "Empty: on CPUs whenever they work in turn anyway, on GPUs when there are too few for one each.",
    )
    engine_memory_share: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Of a GPU's memory, for the engine that shares it with a trainer rank, while it is awake. What the "
        "trainer holds between steps (weights, optimizer) must fit beside it. Empty: 0.5.",
    )
    trainer_cores: int | None = Field(
        None,
        ge=1,
        description="CPU cores of all trainer ranks together. Empty: all of them when trainer and engines work in turn; "
        "when they work at the same time, an equal part for every rank and engine process.",
    )
    engine_cores: int | None = Field(
        None, ge=1, description="CPU cores of all engines together. Empty: as for trainer_cores."
    )
    bind_cores: bool = Field(
        False,
        description="Pin trainer and engines to their cores when they work at the same time. Not for two jobs on one "
        "machine: both would be pinned to the same.",
    )
