"""Rules on which process gets which devices and cores."""

from __future__ import annotations

from collections.abc import Iterator

from configs.blocks.rl import RLConfig
from configs.rules.problem import Problem


def placement_problems(config: RLConfig) -> Iterator[Problem]:
    """Yield what is wrong with the placement."""
    placement, train, rollout = config.placement, config.train, config.rollout
    overlaps = config.schedule.mode == "overlap"
    if placement.colocate and config.colocate is False:
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
        if config.colocate is False:
            yield (
                "placement.engine_memory_share",
                "is for an engine that shares its GPU, and here none does; leave it out",
            )
        if "gpu_memory_utilization" in rollout.engine:
            yield (
                "placement.engine_memory_share",
                "says the same as rollout.engine.gpu_memory_utilization; set only one",
            )
    if placement.bind_cores and config.colocate is not False:
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
