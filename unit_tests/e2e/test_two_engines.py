"""Two real engines in one job: both make groups and hold the trainer's weights. One is killed or frozen in the middle of its
work or of a broadcast, the other goes on, and the new one is taken in."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray

from orchestration.engines.handle import EngineHandle
from orchestration.engines.pool import EnginePool
from orchestration.rl.driver import Driver
from orchestration.rl.job import RLJob
from orchestration.rl.loop import drive
from orchestration.rl.weight_sync import JOINING
from orchestration.run.directory import read_metrics
from orchestration.run.samples import read_samples
from unit_tests.e2e.shared_stack import SharedStack, variant
from unit_tests.e2e.test_failures import STALL_SECONDS, core_of, pid_of, quick_to_judge
from unit_tests.waiting import wait_for

pytestmark = pytest.mark.e2e

STEPS = 4
SMALL = {"rollout": {"engines": 2}, "train": {"steps": STEPS, "updates_per_step": 1}}
JOIN_STALL_SECONDS = 16.0


@pytest.fixture(scope="module")
def second(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineHandle, list[str]]:
    """Another engine beside the session's, whose vLLM was killed in its first start, and what was said of that."""
    (first,), notes = stack.actors.pool.engines, list[str]()
    _, engine, *others = first._arguments
    log_file = str(tmp_path_factory.mktemp("second") / "engine_1.log")
    arguments = (log_file, {**engine, "seed": engine["seed"] + 1}, *others)
    second = EngineHandle("engine 1", first._actor_class, arguments, stack.actors.watch)
    pool = EnginePool([second], stack.actors.watch, 1, "recompute", notes.append)
    wait_for(lambda: pool.look(0.05) or second.member.heartbeat, "the actor has answered")
    wait_for(lambda: cores_of(second), "vLLM's process is there")[0].send_signal(signal.SIGKILL)
    pool.wait_for_all()
    return second, notes


@pytest.fixture(scope="module")
def two(stack: SharedStack, second: tuple[EngineHandle, list[str]]) -> Iterator[EnginePool]:
    """The session's engine, and another one beside it."""
    rollouts, (second, _) = stack.actors.pool, second
    rollouts.engines.append(second)
    rollouts.restarts_left = 2
    yield rollouts
    rollouts.engines.remove(second)
    second.end()


def cores_of(engine: EngineHandle) -> list[psutil.Process]:
    """Return vLLM's process under the engine's actor, if it is there."""
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(pid_of(engine.member)).children(recursive=True)
        return [p for p in children if "EngineCore" in p.name()]
    return []


class Made:
    """Which groups came from which engine."""

    def __init__(self, rollouts: EnginePool, patch: pytest.MonkeyPatch) -> None:
        self.by_engine: dict[str, set[str]] = {}
        for engine in rollouts.engines:
            patch.setattr(engine, "take_in", self._noting(engine))

    def _noting(self, engine: EngineHandle) -> Callable[[], list]:
        take_in, came = engine.take_in, self.by_engine.setdefault(engine.name, set())

        def noted() -> list:
            groups = take_in()
            came.update(group.group_id for group in groups)
            return groups

        return noted


def gaps(job: RLJob) -> list[float]:
    """How far each engine's log-probabilities are from the trainer's, at most."""
    alone = [EnginePool([engine], job.pool.watch, 0, "recompute", print) for engine in job.pool.engines]
    driver, gaps = job.driver, []
    for one in alone:
        prober = Driver(job.config, job.trainers, one, driver.queue, driver.weights, driver.watch)
        prober.probe(job.progress.version, job.prompts.train[: job.config.sync.probe_prompts])
        gaps.append(prober.tally.means()["sync/probe_gap_max"])
    return gaps


def wait_until_usable(engine: EngineHandle, job: RLJob) -> None:
    """Wait until it generates, with the current weights."""
    wait_for(lambda: job.driver.go_round(0.05, submits=False) or engine.state == "usable", f"{engine.name} is in use")


def check_whole(folder: Path) -> list[set[str]]:
    """No step is missing, no group and no prompt is there twice; returns the groups of each step."""
    assert [row["step"] for row in read_metrics(folder)] == list(range(STEPS + 1))
    samples = [read_samples(folder, step) for step in range(1, STEPS + 1)]
    for name in ("group", "prompt_id"):
        seen = [{sample[name] for sample in step} for step in samples]
        assert [len(names) for names in seen] == [8] * STEPS and len(set().union(*seen)) == 8 * STEPS
    return [{sample["group"] for sample in step} for step in samples]


def test_vllm_killed_in_its_first_start_is_started_again(second: tuple[EngineHandle, list[str]]) -> None:
    """Alone catches a death of vLLM in its start that is not read from what vLLM says, and ends the run as a mistake (scripted
    engines: test_engine_pool)."""
    (note,) = second[1]
    assert "engine 1 did not start: Engine core initialization failed" in note


def test_what_a_killed_engine_was_asked_the_other_one_makes(
    stack: SharedStack, two: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone catches groups that are lost or made twice when an engine dies in overlap, while weights are on their way to both."""
    first, second = two.engines
    submit, lost = second.submit, set()

    with stack.job({**SMALL, "schedule": {"mode": "overlap", "max_staleness": 1}}) as job:
        made = Made(two, monkeypatch)

        def struck(requests) -> None:
            is_now = job.progress.trained_steps > 0 and not lost
            core = core_of(pid_of(second.member)) if is_now else 0
            if is_now:
                os.kill(core, signal.SIGSTOP)  # so that it makes nothing of this
            submit(requests)
            if is_now:
                lost.update(request.group_id for request in requests)
                os.kill(core, signal.SIGKILL)

        def look(path: Path) -> Path:
            if job.progress.trained_steps == 1 and not lost:
                job.driver.settle()
                assert max(gaps(job)) < 1e-3
            return path

        monkeypatch.setattr(second, "submit", struck)
        drive(job, look)
        wait_until_usable(second, job)
        assert max(gaps(job)) < 1e-3, "the new engine got the weights of the last step"
    groups = check_whole(job.run.path)
    from_first, from_second = made.by_engine[first.name], made.by_engine[second.name]
    asked_first = groups[0] | groups[1]
    assert asked_first & from_first and asked_first & from_second
    assert from_first.isdisjoint(from_second)
    assert lost and lost <= from_first
    rows = read_metrics(job.run.path)
    assert sum(row.get("rollout/engine_restarts", 0) for row in rows) == 1
    assert sum(row.get("rollout/retried_groups", 0) for row in rows) >= len(lost)
    assert all(row["train/staleness_max"] <= 1 for row in rows[1:])


def test_a_broadcast_that_an_engine_dies_in_is_made_again_without_it_and_later_with_it(
    stack: SharedStack, two: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone catches a weight group that is not made anew, in sync mode, for whoever is there."""
    second = two.engines[1]
    load, struck_in = second.load, []

    with stack.job({**SMALL, "sync": {"method": "nccl"}}) as job:
        made = Made(two, monkeypatch)

        def struck(version, update, in_flight) -> None:
            load(version, update, in_flight)
            if job.progress.trained_steps == 2 and not struck_in:
                struck_in.append(version)
                os.kill(pid_of(second.member), signal.SIGKILL)

        def look(path: Path) -> Path:
            if job.progress.trained_steps == 1:
                assert max(gaps(job)) < 1e-3
            if job.progress.trained_steps == 3:
                wait_until_usable(second, job)
                assert max(gaps(job)) < 1e-3, "the trainer still had the weights, and broadcast them to the new engine"
            return path

        monkeypatch.setattr(second, "load", struck)
        drive(job, look)
        assert max(gaps(job)) < 1e-3, "both are in one group again"
        assert job.driver.weights.method == "nccl"
    groups = check_whole(job.run.path)
    assert struck_in == [2]
    for step in (1, 2, 4):
        for engine in two.engines:
            assert groups[step - 1] & made.by_engine[engine.name], f"{engine.name} made nothing in step {step}"
    rows = read_metrics(job.run.path)
    assert [row["sync/fallbacks"] for row in rows[1:]] == [0] * STEPS
    assert sum(row.get("rollout/engine_restarts", 0) for row in rows) == 1


@pytest.mark.parametrize(
    ("deadly", "call", "mode"),
    [variant(signal.SIGSTOP, 1, "overlap"), (signal.SIGKILL, 2, "sync")],
    ids=["frozen before it joins", "killed while it does"],
)
def test_an_engine_lost_as_it_joins_the_weight_group_is_left_out_of_it(
    stack: SharedStack, two: EnginePool, monkeypatch: pytest.MonkeyPatch, deadly: signal.Signals, call: int, mode: str
) -> None:
    """Alone catches an engine's loss that is taken for a failure of the method: the others give up before it is known."""
    second, calls = two.engines[1], []
    two.restarts_left = 1
    block = {
        **SMALL, "train": {"steps": 2, "updates_per_step": 1}, "sync": {"method": "nccl"}, "schedule": {"mode": mode},
        "failures": {"stall_seconds": JOIN_STALL_SECONDS},
    }  # fmt: skip
    with stack.job(block) as job, monkeypatch.context() as patch:
        get = two.watch.get

        def struck(futures, doing, stall_seconds=None):
            if doing == JOINING:
                calls.append(doing)
                if len(calls) == call:
                    os.kill(core_of(pid_of(second.member)), deadly)
            return get(futures, doing, stall_seconds)

        patch.setattr(two.watch, "get", struck)
        patch.setattr(two.watch, "stall_seconds", JOIN_STALL_SECONDS)
        drive(job, lambda path: path)
        assert job.driver.weights.method == "nccl"
        wait_until_usable(second, job)
        assert max(gaps(job)) < 1e-3
    rows = read_metrics(job.run.path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["sync/fallbacks"] for row in rows[1:]] == [0, 0]
    assert sum(row.get("rollout/engine_restarts", 0) for row in rows) == 1


@pytest.mark.parametrize(("mode", "victim"), [("overlap", "vLLM"), variant("sync", "actor")])
def test_an_engine_that_freezes_in_a_broadcast_is_the_only_one_replaced(
    stack: SharedStack, two: EnginePool, monkeypatch: pytest.MonkeyPatch, mode: str, victim: str
) -> None:
    """Alone catches a broken group that the other engine and the trainer leave too late: they are taken for standing still."""
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
        wait_until_usable(second, job)
        assert max(gaps(job)) < 1e-3
    check_whole(job.run.path)
    assert struck_in
    rows = read_metrics(job.run.path)
    assert [row["sync/fallbacks"] for row in rows[1:]] == [0] * STEPS
    assert sum(row.get("rollout/engine_restarts", 0) for row in rows) == 1


def test_responses_may_take_longer_to_end_than_a_broadcast_may_stand_still(stack: SharedStack, two: EnginePool) -> None:
    """Alone catches a broadcast that begins before responses have ended: here that takes one engine longer, each time, than half
    of stall_seconds, after which a broadcast breaks off."""
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
