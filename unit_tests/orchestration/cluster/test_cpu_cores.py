"""Cores are shared out whole, none twice, and binding holds for every thread and what it starts."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.blocks.evaluation import EvalConfig
from configs.blocks.rl import RLConfig
from configs.reading.load import load
from orchestration.cluster.cpu_cores import CorePlan, bind_to, core_plan, core_warnings
from orchestration.cluster.devices import BUCKETS, FLEX, DeviceSpec
from orchestration.cluster.job_shape import EngineJob, TrainerJob

OVERLAP = "schedule.mode=overlap"


def cpu(cores: int) -> DeviceSpec:
    return DeviceSpec("cpu", "gloo", BUCKETS, cores, 0)


def job(*overrides: str) -> RLConfig:
    return load("configs/grpo.yaml", RLConfig, overrides)


def plan_of(config: RLConfig, device: DeviceSpec) -> CorePlan:
    return core_plan(EngineJob.of_rl(config), TrainerJob.of_rl(config), device)


def warned(config: RLConfig, device: DeviceSpec) -> list[str]:
    return core_warnings(EngineJob.of_rl(config), TrainerJob.of_rl(config), device)


def planned(cores: int, *overrides: str) -> CorePlan:
    return plan_of(job(*overrides), cpu(cores))


def threads(plan: CorePlan) -> tuple[int, int]:
    return plan.trainer_threads, plan.engine_threads


def test_in_turn_both_sides_use_all_cores() -> None:
    assert planned(8) == CorePlan(False, 8, 8, ((),), ((),))
    assert threads(planned(8, "train.ranks=2", "rollout.engines=4")) == (4, 2)
    assert threads(planned(8, "placement.trainer_cores=6", "placement.engine_cores=4")) == (6, 4)
    assert threads(planned(8, OVERLAP, "schedule.pause_while_training=true")) == (8, 8)


def test_at_the_same_time_each_side_has_its_own() -> None:
    assert planned(2, OVERLAP) == CorePlan(True, 1, 1, ((),), ((),))
    assert threads(planned(8, OVERLAP)) == (4, 4)
    assert threads(planned(9, OVERLAP)) == (5, 4), "the odd core is the trainer's"
    assert threads(planned(8, OVERLAP, "train.ranks=2")) == (3, 2)
    assert threads(planned(8, OVERLAP, "placement.trainer_cores=6")) == (6, 2)
    assert threads(planned(8, OVERLAP, "placement.engine_cores=5")) == (3, 5)
    assert threads(planned(8, "placement.colocate=false")) == (4, 4), "also when they work in turn"
    assert threads(planned(8, OVERLAP, "train.threads_per_rank=1")) == (1, 4)


def test_an_engine_of_several_processes_divides_its_cores() -> None:
    assert planned(8, "rollout.engines=2", "rollout.tensor_parallel_size=2").engine_threads == 2


def test_an_evaluation_has_engines_only() -> None:
    engine_job = EngineJob.of_eval(load("configs/eval.yaml", EvalConfig, ["engines=2"]))
    assert core_plan(engine_job, None, cpu(8)) == CorePlan(False, 1, 4, (), ((), ()))


def test_too_few_cores_are_warned_about_and_not_bound() -> None:
    crowded = job(OVERLAP, "train.ranks=2")
    assert threads(plan_of(crowded, cpu(2))) == (1, 1)
    assert ["schedule.mode: 2 thread(s) of trainer ranks and 1 of engines" in w for w in warned(crowded, cpu(2))] == [
        True
    ]
    assert warned(crowded, cpu(3)) == []
    with pytest.raises(ValueError, match="bind_cores: 2 ranks and 1 engine processes on 2 cores"):
        planned(2, OVERLAP, "train.ranks=2", "placement.bind_cores=true")


@pytest.mark.parametrize(
    "overrides",
    [
        ["placement.trainer_cores=5"],
        [OVERLAP, "placement.trainer_cores=4"],
        [OVERLAP, "placement.trainer_cores=3", "placement.engine_cores=2"],
    ],
)
def test_more_cores_than_there_are(overrides: list[str]) -> None:
    with pytest.raises(ValueError, match=r"trainer_cores .*engine_cores|cores for 1 ranks"):
        planned(4, *overrides)


def test_gpus_have_no_cores_to_share_out() -> None:
    spec = dataclasses.replace(cpu(8), device="cuda", attention=FLEX, gpus=2)
    assert threads(plan_of(job(OVERLAP, "train.ranks=2"), spec)) == (4, 8)
    with pytest.raises(ValueError, match="are for jobs on CPUs"):
        plan_of(job(OVERLAP, "placement.bind_cores=true"), spec)


@given(cores=st.integers(2, 64), ranks=st.integers(1, 8), engines=st.integers(1, 8))
def test_bound_cores_are_used_once(cores: int, ranks: int, engines: int) -> None:
    if ranks + engines > cores:
        return
    plan = planned(cores, OVERLAP, f"train.ranks={ranks}", f"rollout.engines={engines}", "placement.bind_cores=true")
    groups = [*plan.trainer_cores, *plan.engine_cores]
    assert sorted(core for group in groups for core in group) == list(range(cores))
    assert (len(plan.trainer_cores), len(plan.engine_cores)) == (ranks, engines)
    assert all(plan.trainer_threads <= len(group) for group in plan.trainer_cores)
    assert all(plan.engine_threads <= len(group) for group in plan.engine_cores)


def _bound(position: int, results: Any) -> None:
    """In a process of its own: binding cannot be taken back for threads that ended meanwhile."""
    begun, release, seen = threading.Event(), threading.Event(), []

    def earlier() -> None:
        begun.set()
        release.wait()
        seen.append(os.sched_getaffinity(threading.get_native_id()))

    thread = threading.Thread(target=earlier)
    thread.start()
    begun.wait()
    usable = sorted(os.sched_getaffinity(0))
    bind_to(())
    assert os.sched_getaffinity(0) == set(usable)
    bind_to([position])
    release.set()
    thread.join()
    try:
        bind_to([len(usable)])
    except ValueError as error:
        results.put((usable[position], os.sched_getaffinity(0), seen[0], str(error)))


def test_binding_holds_for_threads_that_were_there_before() -> None:
    context = multiprocessing.get_context("fork")
    results: Any = context.SimpleQueue()
    process = context.Process(target=_bound, args=(0, results))
    process.start()
    core, main, earlier, refusal = results.get()
    process.join()
    assert main == earlier == {core}
    assert "placement.bind_cores: core" in refusal
