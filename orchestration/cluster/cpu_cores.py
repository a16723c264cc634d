"""Share out the CPU cores between trainer ranks and engines.

When the threads of both sides run on the same cores at the same time, both lose most of their speed.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from configs.blocks.placement import Placement
from orchestration.cluster.devices import DeviceSpec
from orchestration.cluster.job_shape import EngineJob, TrainerJob


@dataclass(frozen=True)
class CorePlan:
    """The threads and cores of every process. A core is given by its position among those that the process may use."""

    together: bool  # trainer and engines work at the same time, each side on cores of its own
    trainer_threads: int  # per rank
    engine_threads: int  # per process of an engine; a tensor-parallel engine has several
    trainer_cores: tuple[tuple[int, ...], ...]  # per rank, the cores it is bound to; () means not bound
    engine_cores: tuple[tuple[int, ...], ...]  # per engine, the cores it is bound to; () means not bound


def core_plan(engine_job: EngineJob, trainer_job: TrainerJob | None, device: DeviceSpec) -> CorePlan:
    """Share out the cores of `device`; without a trainer the engines get them all.

    When trainer and engines work in turn, both use all cores. When they work at the same time on a CPU, every rank and
    every engine process gets equally many, and the trainer gets the rest; with fewer cores than processes, each process
    runs one thread.

    Raises:
        ValueError: placement.trainer_cores and engine_cores do not fit, there are too few cores to bind, or one of
            these keys is set on GPUs.
    """
    engines, processes = engine_job.engines, engine_job.processes
    if trainer_job is None:
        return CorePlan(False, 1, max(1, device.cores // processes), (), ((),) * engines)
    placement, ranks = trainer_job.placement, trainer_job.ranks
    if device.device == "cuda" and (placement.trainer_cores or placement.engine_cores or placement.bind_cores):
        raise ValueError(
            "placement.trainer_cores, engine_cores and bind_cores are for jobs on CPUs; on GPUs leave them out "
            "(train.threads_per_rank sets the trainer's threads)"
        )
    together = device.device == "cpu" and trainer_job.colocate is False
    for_trainer, for_engines = _shares(placement, device.cores, ranks, processes, together)
    trainer_cores: tuple[tuple[int, ...], ...] = ((),) * ranks
    engine_cores: tuple[tuple[int, ...], ...] = ((),) * engines
    if together and placement.bind_cores:
        if ranks + processes > device.cores:
            raise ValueError(
                f"placement.bind_cores: {ranks} ranks and {processes} engine processes on {device.cores} cores cannot "
                "have cores of their own; leave it out, or lower train.ranks or rollout.engines"
            )
        trainer_cores = _split_evenly(range(for_trainer), ranks)
        engine_cores = _split_evenly(range(for_trainer, for_trainer + for_engines), engines)
    return CorePlan(
        together=together,
        trainer_threads=trainer_job.threads_per_rank or max(1, for_trainer // ranks),
        engine_threads=max(1, for_engines // processes),
        trainer_cores=trainer_cores,
        engine_cores=engine_cores,
    )


def _shares(placement: Placement, cores: int, ranks: int, processes: int, together: bool) -> tuple[int, int]:
    """Return the number of cores of the trainer and of the engines: at least one per process, even with too few."""
    trainer, engines = placement.trainer_cores, placement.engine_cores
    if not together:
        trainer, engines = trainer or cores, engines or cores
        if max(trainer, engines) > cores:
            raise ValueError(
                f"placement: trainer_cores {trainer} and engine_cores {engines} must each be at most the {cores} cores "
                "there are"
            )
        return trainer, engines
    if trainer is None and engines is None:
        engines = max(1, cores // (ranks + processes)) * processes
        return max(ranks, cores - engines), engines
    trainer = trainer if trainer is not None else cores - (engines or 0)
    engines = engines if engines is not None else cores - trainer
    if trainer < ranks or engines < processes or trainer + engines > cores:
        raise ValueError(
            f"placement: {trainer} cores for {ranks} ranks and {engines} for {processes} engine processes at the same "
            f"time do not fit {cores} cores; change trainer_cores and engine_cores, or leave both empty to have the "
            "cores shared out"
        )
    return trainer, engines


def core_warnings(engine_job: EngineJob, trainer_job: TrainerJob, device: DeviceSpec) -> list[str]:
    """Return the warning, if any, that there are more threads than cores."""
    plan, ranks = core_plan(engine_job, trainer_job, device), trainer_job.ranks
    by_trainer = ranks * plan.trainer_threads
    by_engines = engine_job.processes * plan.engine_threads
    if by_trainer > device.cores:
        return [
            f"train.threads_per_rank: {ranks} ranks x {plan.trainer_threads} threads on {device.cores} cores "
            "slow each other down"
        ]
    if plan.together and by_trainer + by_engines > device.cores:
        return [
            f"schedule.mode: {by_trainer} thread(s) of trainer ranks and {by_engines} of engines work at the same time "
            f"on {device.cores} cores and slow each other down; lower train.ranks, train.threads_per_rank or "
            "rollout.engines"
        ]
    return []


def _split_evenly(cores: range, parts: int) -> tuple[tuple[int, ...], ...]:
    """Split the cores into runs of neighbours whose sizes differ by at most one."""
    bounds = [len(cores) * i // parts for i in range(parts + 1)]
    return tuple(tuple(cores[low:high]) for low, high in itertools.pairwise(bounds))


def bind_to(positions: Sequence[int]) -> None:
    """Pin every thread of this process, and whatever it starts later, to the cores at these positions among its own.

    Empty `positions` change nothing.

    Raises:
        ValueError: this process may use fewer cores than the machine on which the plan was made.
    """
    if not positions:
        return
    usable = sorted(os.sched_getaffinity(0))
    if max(positions) >= len(usable):
        raise ValueError(
            f"placement.bind_cores: core {max(positions)} is wanted, but {os.uname().nodename} has {len(usable)} cores "
            "for this process; use machines with equally many cores, or leave bind_cores out"
        )
    chosen = {usable[position] for position in positions}
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # the thread may have ended meanwhile
            os.sched_setaffinity(int(thread), chosen)
