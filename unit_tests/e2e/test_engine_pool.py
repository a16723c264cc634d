"""Several engines in one pool: who gets what, and what happens to the rest when one is lost. The engines are scripted, their
processes and Ray are real. Most tests take the same three engines, one test after the other."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError

from orchestration.cluster.ray_session import started_ray
from orchestration.cluster.watchdog import EngineLost, EnginesLost, Watch
from orchestration.engines.handle import EngineHandle
from orchestration.engines.pool import CurrentWeights, EnginePool
from orchestration.engines.requests import step_requests
from records.rollout import Group, Prompt
from rollouts.vllm.engine import WeightLoadError
from rollouts.vllm.sampling import Sampling
from unit_tests.e2e.scripted_actor import SLOW_SECONDS, ScriptedActor
from unit_tests.waiting import is_alive, wait_for

pytestmark = pytest.mark.e2e

SAMPLES = 2
STALL_SECONDS = 8.0
SAMPLING = Sampling(max_new_tokens=8)
PROMPTS = [Prompt(f"p/{i}", [{"role": "user", "content": "a " * (1 + i)}]) for i in range(12)]


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    with started_ray():
        yield


def started(folder: Path, starts: tuple[str, ...], restarts: int) -> tuple[EnginePool, list[str]]:
    """Engines on their way, whose first starts go as `starts` says (see SlowEngine); and the list of what is said of them."""
    watch, notes = Watch(stall_seconds=60.0), list[str]()
    actor_class = ray.remote(ScriptedActor).options(num_cpus=0)
    engines = [
        EngineHandle(f"engine {i}", actor_class, (str(folder / f"{i}.log"), outcomes), watch)
        for i, outcomes in enumerate(starts)
    ]
    return EnginePool(engines, watch, restarts, "recompute", notes.append), notes


class Shared:
    """The three engines of most tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pool: EnginePool | None = None

    def ready(self) -> EnginePool:
        """Return all three at work, with weights of version 0 and nothing to do."""
        if self.pool is None:
            self.pool, self.notes = started(self.folder, ("", "", ""), 0)
        pool = self.pool
        pool.watch.stall_seconds, pool.restarts_left = 60.0, 9
        pool.weights = CurrentWeights(0, {})
        pool.wait_for_all()
        ray.get([actor.generate_at.remote(0.05) for actor in pool.actors])
        ray.get([actor.be_late.remote() for actor in pool.actors])
        pool.load_weights(0, {})
        collect_all(pool)
        pool.tally()
        self.notes.clear()
        pool.restarts_left = 2
        return pool


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    shared = Shared(tmp_path_factory.mktemp("engines"))
    yield shared
    if shared.pool is not None:
        shared.pool.abandon()


@pytest.fixture
def pool(shared: Shared) -> EnginePool:
    return shared.ready()


def submit(pool: EnginePool, label: str) -> list[str]:
    """Request all prompts; return the ids of their groups."""
    requests = step_requests(PROMPTS, SAMPLES, SAMPLING, 1, label)
    pool.submit(requests)
    return [request.group_id for request in requests]


def collect_all(pool: EnginePool) -> list[Group]:
    groups: list[Group] = []

    def is_done() -> bool:
        groups.extend(pool.collect(1.0))
        return not pool.unfinished

    wait_for(is_done, "all groups have come")
    return groups


def ids_of(groups: list[Group]) -> list[str]:
    return sorted(group.group_id for group in groups)


def process_of(engine: EngineHandle) -> int:
    pid: int = ray.get(engine.actor.process.remote())
    return pid


def versions_of(pool: EnginePool) -> list[Any]:
    return ray.get([actor.version.remote() for actor in pool.actors])


def kill_in_its_start(engine: EngineHandle) -> None:
    log = Path(engine.log_file)
    wait_for(lambda: log.exists() and log.read_text().endswith("\n"), f"{engine.name} begins to start")
    os.kill(int(log.read_text().splitlines()[-1]), signal.SIGKILL)


def test_an_engine_lost_in_its_first_start_is_started_again_whatever_its_next_start_says(tmp_path: Path) -> None:
    """Alone catches a loss in the first start, or an error of a start after a loss, that ends the run: what the lost engine held
    may not be free yet, or the disk full for a moment."""
    pool, notes = started(tmp_path, ("h", "hf", "hc"), restarts=5)
    for engine in pool.engines:
        kill_in_its_start(engine)
    pool.wait_for_all()
    said = [[note for note in notes if engine.log_file in note] for engine in pool.engines]
    assert [len(notes) for notes in said] == [1, 2, 2], notes
    assert all("died" in first for first, *_ in said)
    assert "engine 1 did not start again: there is no such model" in said[1][1]
    assert "No space left on device" in said[2][1]
    assert pool.tally().means()["rollout/engine_restarts"] == 5 and pool.restarts_left == 0
    submit(pool, "first")
    assert len(collect_all(pool)) == len(PROMPTS)
    assert all(engine.counters is not None for engine in pool.engines), "all made some of them"
    pool.abandon()


@pytest.mark.parametrize(
    ("outcome", "error", "words"),
    [("f", ValueError, "there is no such model"), ("c", ActorDiedError, "No space left on device")],
    ids=["in its start", "in its construction"],
)
def test_a_mistake_found_in_the_first_start_ends_the_run_at_once_as_itself(
    tmp_path: Path, outcome: str, error: type[Exception], words: str
) -> None:
    """Alone catches restarts that are spent on a mistake, which every further start would find again."""
    pool, notes = started(tmp_path, (outcome,), restarts=2)
    with pytest.raises(error, match=words):
        pool.wait_for_all()
    assert notes == [] and pool.restarts_left == 2
    pool.abandon()


def test_an_engine_that_starts_slowly_is_not_taken_for_one_that_stands_still(tmp_path: Path) -> None:
    """Alone catches a start that is judged by the time-out of work, or work that is judged by what was said in the start."""
    pool, notes = started(tmp_path, ("hs",), restarts=2)
    kill_in_its_start(pool.engines[0])
    pool.watch.stall_seconds = SLOW_SECONDS / 2
    pool.weights = CurrentWeights(0, None)  # it gets its weights with the next load
    submit(pool, "first")
    while not pool.engines[0].is_started:
        pool.collect(0.5)
    pool.load_weights(1, {})
    assert len(collect_all(pool)) == len(PROMPTS)
    assert len(notes) == 1, notes
    pool.abandon()


def test_a_lost_engines_groups_go_to_the_others_and_the_new_one_gets_the_weights(pool: EnginePool) -> None:
    """Alone catches groups that wait for their engine's replacement, come twice, or are made again under old weights."""
    frozen = pool.engines[2]
    ray.get(frozen.actor.generate_at.remote(1000.0))
    ids = submit(pool, "first")
    assert [len(engine.outstanding) for engine in pool.engines] == [4, 4, 4]
    os.kill(process_of(frozen), signal.SIGSTOP)
    pool.watch.stall_seconds = STALL_SECONDS
    assert ids_of(collect_all(pool)) == sorted(ids)
    assert pool.tally().means()["rollout/retried_groups"] == 4
    pool.watch.stall_seconds = 60.0
    pool.load_weights(7, {})
    wait_for(lambda: pool.look(0.05) or frozen.state == "usable", "the new engine is in use")
    assert versions_of(pool) == [7, 7, 7]
    ids = submit(pool, "second")
    groups = collect_all(pool)
    assert ids_of(groups) == sorted(ids)
    assert all((t.versions == 7).all() for group in groups for t in group.trajectories)


def test_new_engines_wait_for_weights_that_cannot_come_now(pool: EnginePool) -> None:
    """Alone catches a new engine that generates before it has weights, as with nccl when the trainer's have moved on."""
    pool.load_weights(3, {}, stays=False)
    first = pool.engines[0]
    submit(pool, "first")
    os.kill(process_of(first), signal.SIGKILL)
    collect_all(pool)
    wait_for(lambda: pool.look(0.05) or first.state == "started", "the new engine has started")
    ids = submit(pool, "second")
    assert not first.outstanding, "it has no weights"
    assert ids_of(collect_all(pool)) == sorted(ids)
    assert len(pool.load_weights(4, {})) == 3
    assert first.state == "usable"
    assert versions_of(pool) == [4, 4, 4]


@pytest.mark.parametrize("late", ["submit", "cancel"])
def test_what_a_refused_load_cut_off_is_asked_again_after_one_that_succeeds(pool: EnginePool, late: str) -> None:
    """Alone catches a call of an actor that is overtaken by those after it, and groups that a refused load loses."""
    ray.get([actor.be_late.remote(**{late: 1.5}) for actor in pool.actors])
    ids = submit(pool, "first")
    groups = pool.collect(0.2)
    with pytest.raises(WeightLoadError, match="checksum"):
        pool.load_weights(1, {"refusal": "checksum"})
    assert [engine.state for engine in pool.engines] == ["refused"] * 3
    groups += pool.collect(1.0)
    pool.load_weights(2, {})
    assert ids_of(groups + collect_all(pool)) == sorted(ids)
    assert "rollout/engine_restarts" not in pool.tally().means()


def test_a_load_that_all_engines_are_lost_in_is_not_continued_by_those_that_follow(pool: EnginePool) -> None:
    """Alone catches new engines that join a broadcast which began without them."""
    pool.restarts_left = 3
    for engine in pool.engines:
        os.kill(process_of(engine), signal.SIGKILL)
    with pytest.raises(EngineLost, match="died"):
        pool.load_weights(1, {})
    assert [engine.state for engine in pool.engines] == ["starting"] * 3
    pool.load_weights(2, {})
    pool.wait_for_all()
    assert versions_of(pool) == [2, 2, 2]


def test_a_new_engine_that_does_not_take_the_weights_is_lost_too(pool: EnginePool, shared: Shared) -> None:
    """Alone catches a new engine's refusal that ends the run, or is told with the traceback that Ray adds."""
    pool.weights = CurrentWeights(1, {"refusal": "checksum"})
    submit(pool, "first")
    os.kill(process_of(pool.engines[2]), signal.SIGKILL)
    collect_all(pool)
    wait_for(lambda: pool.look(0.05) or len(shared.notes) == 2, "the new engine has refused the weights")
    assert "engine 2 was started again and did not take the weights: checksum. " in shared.notes[1]
    assert "Traceback" not in shared.notes[1] and "ray::" not in shared.notes[1]


def test_a_loss_for_good_is_one_loss_whoever_meets_it_next(pool: EnginePool) -> None:
    """Alone catches a loss that is counted again when the driver, in the middle of a checkpoint, goes on for a while; and a
    message without the losses before."""
    pool.restarts_left = 0
    before = [lost.how for _, lost in pool._deaths]
    submit(pool, "first")
    os.kill(process_of(pool.engines[2]), signal.SIGKILL)
    said = []
    for _ in range(2):
        with pytest.raises(EnginesLost) as lost:
            collect_all(pool)
        said.append(str(lost.value))
    for words in (f"loss number {len(before) + 1} of this run", *before, "engine 2 (pid "):
        assert words in said[0]
    assert said[1] == said[0]
    pool.engines[2].begin_again()  # for the tests that come


def test_engines_are_closed_also_when_one_is_lost_in_the_end(pool: EnginePool, shared: Shared) -> None:
    """Alone catches a loss while the pool is closed that keeps the other engines from it, or leaves processes."""
    killed, frozen = (process_of(engine) for engine in pool.engines[:2])
    os.kill(killed, signal.SIGKILL)
    os.kill(frozen, signal.SIGSTOP)
    pool.watch.stall_seconds = STALL_SECONDS
    pool.close()
    shared.pool = None
    assert [(shared.folder / f"{i}.closed").exists() for i in range(3)] == [False, False, True]
    assert len(shared.notes) == 2 and "engine 0" in shared.notes[0] and "engine 1" in shared.notes[1]
    wait_for(lambda: not any(map(is_alive, (killed, frozen))), "their processes have ended")
