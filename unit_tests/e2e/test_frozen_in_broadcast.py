"""Two real engines take a broadcast, and one freezes in it: it is replaced, and nobody else."""

from __future__ import annotations

import os
import signal

import pytest
import ray

from orchestration.engines.pool import EnginePool
from orchestration.rl.loop import drive
from orchestration.run.directory import read_metrics
from unit_tests.e2e.shared_stack import SharedStack
from unit_tests.e2e.test_failures import STALL_SECONDS, core_of, pid_of, quick_to_judge
from unit_tests.e2e.test_two_engines import SMALL, STEPS, check_whole, gaps, two, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]

__all__ = ["two"]  # the fixture


@pytest.mark.parametrize(("mode", "victim"), [("overlap", "vLLM"), ("sync", "actor")])
def test_an_engine_that_freezes_in_a_broadcast_is_the_only_one_replaced(
    stack: SharedStack, two: EnginePool, monkeypatch: pytest.MonkeyPatch, mode: str, victim: str
) -> None:
    """The other one, and the trainer, are out of the broken group before they are taken for standing still themselves."""
    second = two.engines[1]
    load, struck_in = second.load, []
    two.restarts_left = 1
    changes = {"sync": {"method": "nccl"}, "schedule": {"mode": mode}, "failures": {"stall_seconds": STALL_SECONDS}}

    with stack.job({**SMALL, **changes}) as job, quick_to_judge(two.watch):

        def struck(version, update, in_flight) -> None:
            if job.progress.trained_steps == 2 and not struck_in:
                struck_in.append(version)
                actor = pid_of(second.member)
                os.kill(core_of(actor) if victim == "vLLM" else actor, signal.SIGSTOP)
            load(version, update, in_flight)

        monkeypatch.setattr(second, "load", struck)
        drive(job, lambda path: path)
        wait_for(second, job)
        assert max(gaps(job)) < 1e-3
    check_whole(job.run.path)
    assert struck_in
    rows = read_metrics(job.run.path)
    assert [row["sync/fallbacks"] for row in rows[1:]] == [0] * STEPS
    assert sum(row.get("rollout/engine_restarts", 0) for row in rows) == 1


def test_responses_may_take_longer_to_end_than_a_broadcast_may_stand_still(stack: SharedStack, two: EnginePool) -> None:
    """With drain the broadcast begins when they have ended; here that takes one engine longer than half of stall_seconds, after
    which a broadcast breaks off, each time."""
    schedule = {"mode": "overlap", "in_flight": "drain"}
    changes = {"sync": {"method": "nccl"}, "schedule": schedule, "failures": {"stall_seconds": STALL_SECONDS}}
    two.restarts_left = 0
    slow = two.engines[0].actor
    ray.get(slow.drain_late.remote(0.6 * STALL_SECONDS))
    with stack.job({**SMALL, **changes}) as job, quick_to_judge(two.watch):
        drive(job, lambda path: path)
        assert max(gaps(job)) < 1e-3
    ray.get(slow.drain_late.remote(0.0))
    check_whole(job.run.path)
    rows = read_metrics(job.run.path)[1:]
    assert all(row["time/sync_seconds"] > 0.6 * STALL_SECONDS for row in rows)
    assert all("sync/drain_seconds" in row and row["sync/fallbacks"] == 0 for row in rows)
