"""Who gets which devices: trainer and engines on the same ones in turn, or each on their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from configs.blocks.block import Block

if TYPE_CHECKING:
    from configs.blocks.rl import RLConfig

Problem = tuple[str, str]  # dotted key, message


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


def colocate(config: RLConfig) -> bool | None:
    """placement.colocate, where None means "when devices are few": False where both sides work at the same time."""
    in_turn = config.schedule.mode == "sync" or config.schedule.pause_while_training
    return config.placement.colocate if in_turn else False


def placement_problems(config: RLConfig) -> Iterator[Problem]:
    """What cannot be meant."""
    placement, train, rollout = config.placement, config.train, config.rollout
    overlaps = config.schedule.mode == "overlap"
    if placement.colocate and colocate(config) is False:
        yield (
            "placement.colocate",
            "true has trainer and engines take turns on the same devices, but with schedule.mode overlap both work at the "
            "same time; set schedule.pause_while_training, or leave placement.colocate empty",
        )
    if placement.colocate is False and overlaps and config.schedule.pause_while_training:
        yield (
            "schedule.pause_while_training",
            "engines with devices of their own (placement.colocate false) need not stand still; leave one of the two out",
        )
    if placement.engine_memory_share is not None:
        if colocate(config) is False:
            yield (
                "placement.engine_memory_share",
                "is for an engine that shares its GPU, and here none does; leave it out",
            )
        if "gpu_memory_utilization" in rollout.engine:
            yield (
                "placement.engine_memory_share",
                "says the same as rollout.engine.gpu_memory_utilization; set only one",
            )
    if placement.bind_cores and colocate(config) is not False:
        yield (
            "placement.bind_cores",
            "pins each side to cores of its own, but here trainer and engines take turns on the same cores; use "
            "schedule.mode overlap without schedule.pause_while_training, or leave it out",
        )
    processes = rollout.engines * rollout.tensor_parallel_size
    for key, cores, needed, who in (
        ("trainer_cores", placement.trainer_cores, train.ranks, "train.ranks"),
        ("engine_cores", placement.engine_cores, processes, "rollout.engines x rollout.tensor_parallel_size"),
    ):
        if cores is not None and cores < needed:
            yield f"placement.{key}", f"{cores} for {who} = {needed} processes; give each at least one"
    if placement.trainer_cores is not None and train.ranks * train.threads_per_rank > placement.trainer_cores:
        yield (
            "train.threads_per_rank",
            f"{train.ranks} ranks x {train.threads_per_rank} threads on placement.trainer_cores {placement.trainer_cores} "
            "slow each other down; lower it, or leave it 0",
        )
