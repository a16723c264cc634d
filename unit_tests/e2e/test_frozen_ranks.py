"""The watchdog over real processes that are frozen, or that Ray ends for their memory: whoever is lost is named, and nobody else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from orchestration.cluster.heartbeat import Activity, Heartbeat
from orchestration.cluster.processes import lead_own_group
from orchestration.cluster.ray_session import started_ray
from orchestration.cluster.watchdog import TrainerLost, Watch
from unit_tests.waiting import PATIENCE_SECONDS, wait_for

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).resolve().parents[2]


class Rank:
    """Does what a trainer rank does in the watchdog's eyes."""

    def __init__(self) -> None:
        lead_own_group()
        self.activity = Activity()

    @ray.method(concurrency_group="heartbeat")
    def heartbeat(self) -> Heartbeat:
        return self.activity.heartbeat()

    def process(self) -> int:
        return os.getpid()

    def work(self, seconds: float, complaint: str = "") -> None:
        with self.activity.during("all-reduce"):
            time.sleep(seconds)
            if complaint:
                raise RuntimeError(complaint)


def started(count: int, watch: Watch) -> tuple[list[Any], list[int]]:
    """Watched ranks, and their processes."""
    actors = [ray.remote(concurrency_groups={"heartbeat": 1})(Rank).options(num_cpus=0).remote() for _ in range(count)]
    members = [watch.add(f"trainer rank {i}", actor, TrainerLost) for i, actor in enumerate(actors)]
    processes = watch.get([actor.process.remote() for actor in actors], "start", stall_seconds=120)
    # who has never answered is named in other words
    wait_for(lambda: watch.look() or all(member.heartbeat for member in members), "all have answered")
    return actors, processes


@pytest.fixture(scope="module")
def _ray() -> Iterator[None]:
    with started_ray():
        yield


@pytest.mark.usefixtures("_ray")
def test_with_the_shortest_time_out_the_frozen_rank_is_named_and_not_the_one_that_waits_for_it() -> None:
    """Alone catches heartbeats too rare for a short time-out: the rank that waits is named."""
    watch = Watch(stall_seconds=5.0)
    (waiting, frozen), (_, pid) = started(2, watch)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(
        TrainerLost, match=r"step: trainer rank 1 .*has not answered for \d+ s.* trainer rank 0"
    ) as lost:
        watch.get([waiting.work.remote(60), frozen.work.remote(60)], "step")
    assert lost.value.name == "trainer rank 1"
    ray.kill(waiting)


@pytest.mark.usefixtures("_ray")
def test_a_rank_is_frozen_and_the_collective_of_another_gives_up_before_the_watchdog() -> None:
    """Alone catches a rank that is blamed for the silence of another one."""
    watch = Watch(stall_seconds=3600.0)
    (waiting, frozen), (_, pid) = started(2, watch)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(TrainerLost, match=r"trainer rank 1 .*has not answered") as lost:
        watch.get([waiting.work.remote(3, "all-reduce timed out"), frozen.work.remote(60)], "step")
    assert time.monotonic() - began < PATIENCE_SECONDS, "the watchdog waits for an hour"
    assert "timed out" in str(lost.value.__cause__)
    ray.kill(waiting)


@pytest.mark.usefixtures("_ray")
def test_a_dead_rank_that_was_found_before_the_complaint_of_another_is_the_one_that_was_lost() -> None:
    """Alone catches a death that is forgotten when another rank complains."""
    watch = Watch(stall_seconds=3600.0)
    (complaining, dead), (_, pid) = started(2, watch)
    os.kill(pid, signal.SIGKILL)
    calls = [complaining.work.remote(0, "connection closed by peer"), dead.work.remote(60)]
    wait_for(lambda: watch.look() or watch._lost, "the death is found")
    ray.wait(calls, num_returns=2, timeout=PATIENCE_SECONDS)
    with pytest.raises(TrainerLost, match=r"trainer rank 1 .*died") as lost:
        watch.get(calls, "step")
    assert lost.value.name == "trainer rank 1" and "closed by peer" in str(lost.value.__cause__)
    ray.kill(complaining)


@pytest.mark.usefixtures("_ray")
def test_an_error_of_a_rank_is_its_own_when_the_others_answer() -> None:
    """Alone catches an error of the code that is taken for a loss."""
    watch = Watch(stall_seconds=3600.0)
    (first, other), _ = started(2, watch)
    with pytest.raises(RuntimeError, match="shapes differ"):
        watch.get([first.work.remote(0.1, "shapes differ"), other.work.remote(3)], "step")
    for actor in (first, other):
        ray.kill(actor)


def test_an_actor_that_ray_ends_because_memory_ran_out_is_lost() -> None:
    """Alone catches Ray's error for it, which is no death by its class. Memory is short before anything is started."""
    code = """
import ray, pytest
from orchestration.cluster.watchdog import TrainerLost, Watch
from unit_tests.e2e.test_frozen_ranks import Rank
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
watch = Watch(stall_seconds=60.0)
actor = ray.remote(concurrency_groups={"heartbeat": 1})(Rank).options(num_cpus=0).remote()
watch.add("trainer rank 0", actor, TrainerLost)
with pytest.raises(TrainerLost, match="trainer rank 0 .* died: Ray killed it because memory ran out: Memory usage .* exceeded"):
    watch.get([actor.work.remote(60)], "step")
print("lost as it should be")
"""
    threshold = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "100"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **threshold}, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )  # fmt: skip
    assert "lost as it should be" in done.stdout, done.stderr[-3000:]
