"""Several engines under one handle: who gets what, and what happens to the rest when one is lost. Engines are scripted, their
processes and all that is around them are real."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError

from orchestration.cluster.ray_session import started_ray
from orchestration.cluster.watchdog import EngineLost, EnginesLost, Watch
from orchestration.engines.handle import EngineHandle
from orchestration.engines.pool import EnginePool
from orchestration.engines.requests import step_requests
from records.rollout import Group, Prompt
from rollouts.vllm.engine import WeightLoadError
from rollouts.vllm.sampling import Sampling
from unit_tests.e2e.test_failures import is_alive

pytestmark = pytest.mark.e2e

SAMPLES = 2
SAMPLING = Sampling(max_new_tokens=8)
PROMPTS = [Prompt(f"p/{i}", [{"role": "user", "content": "a " * (1 + i)}]) for i in range(12)]


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    with started_ray():
        yield


@pytest.fixture
def made(tiny_model: Path, tmp_path: Path) -> Iterator[EnginePool]:
    """Three engines: two quick ones, and one that takes seconds for a response."""
    from unit_tests.e2e.scripted_actor import ScriptedActor

    watch = Watch(stall_seconds=6.0)
    actor_class = ray.remote(ScriptedActor).options(num_cpus=0)
    engines = [
        EngineHandle(f"engine {i}", actor_class, (str(tmp_path / f"{i}.log"), str(tiny_model), seconds), watch)
        for i, seconds in enumerate((0.05, 0.05, 1.0))
    ]
    group = EnginePool(engines, watch, 2, "recompute", note=print)
    group.wait_for_all()
    yield group
    group.abandon()


def ask(group: EnginePool, label: str) -> list[str]:
    """All prompts; returns the ids of their groups."""
    requests = step_requests(PROMPTS, SAMPLES, label, ())
    group.ask(requests, SAMPLING, 1)
    return [request.group_id for request in requests]


def collect_all(group: EnginePool, seconds: float = 120.0) -> list[Group]:
    groups: list[Group] = []
    deadline = time.monotonic() + seconds
    while group.unfinished:
        assert time.monotonic() < deadline, f"{[a.group_id for a in group.unfinished]} did not come"
        groups += group.collect(1.0)
    return groups


def process_of(engine: EngineHandle) -> int:
    pid: int = ray.get(engine.actor.process.remote())
    return pid


def versions_of(group: EnginePool) -> list[Any]:
    return ray.get([actor.version.remote() for actor in group.actors])


def started(
    folder: Path, model: Path, starts: tuple[str, ...], restarts: int, stall_seconds: float = 60.0
) -> tuple[EnginePool, list[str]]:
    """Engines whose first starts go as told (see SlowEngine), on their way; and what is said of them."""
    from unit_tests.e2e.scripted_actor import ScriptedActor

    watch, notes = Watch(stall_seconds), list[str]()
    actor_class = ray.remote(ScriptedActor).options(num_cpus=0)
    engines = [
        EngineHandle(f"engine {i}", actor_class, (str(folder / f"{i}.log"), str(model), 0.05, outcome), watch)
        for i, outcome in enumerate(starts)
    ]
    return EnginePool(engines, watch, restarts, "recompute", notes.append), notes


def kill_in_its_start(engine: EngineHandle) -> None:
    deadline = time.monotonic() + 150
    while not (log := Path(engine.log_file)).exists() or not log.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(int(log.read_text().splitlines()[-1]), signal.SIGKILL)


def test_an_engine_lost_in_its_first_start_is_started_again(tiny_model: Path, tmp_path: Path) -> None:
    group, notes = started(tmp_path, tiny_model, ("ok", "h"), restarts=1)
    kill_in_its_start(group.engines[1])
    group.wait_for_all()
    assert len(notes) == 1 and "engine 1" in notes[0] and "died" in notes[0]
    assert group.tally().means()["rollout/engine_restarts"] == 1
    ask(group, "first")
    assert len(collect_all(group)) == len(PROMPTS)
    assert all(engine.counters is not None for engine in group.engines), "both made some of them"
    group.abandon()


def test_engines_lost_in_their_first_start_for_good_end_the_run(tiny_model: Path, tmp_path: Path) -> None:
    group, _ = started(tmp_path, tiny_model, ("h",), restarts=0)
    kill_in_its_start(group.engines[0])
    with pytest.raises(EnginesLost, match=r"engine 0 .*died.*loss number 1 of this run"):
        group.wait_for_all()
    group.abandon()


def test_a_mistake_found_in_the_first_start_ends_the_run_at_once_as_itself(tiny_model: Path, tmp_path: Path) -> None:
    """It would be found in every further one."""
    group, notes = started(tmp_path, tiny_model, ("f", "ok"), restarts=2)
    with pytest.raises(ValueError, match="there is no such model"):
        group.wait_for_all()
    assert notes == [] and group.restarts_left == 2
    group.abandon()


def test_a_start_that_follows_a_loss_is_tried_again_whatever_it_says(tiny_model: Path, tmp_path: Path) -> None:
    """What the lost one held may not be free yet."""
    group, notes = started(tmp_path, tiny_model, ("hf",), restarts=2)
    kill_in_its_start(group.engines[0])
    group.wait_for_all()
    assert len(notes) == 2 and "engine 0 did not start again: there is no such model" in notes[1]
    group.abandon()


def test_one_that_follows_a_loss_and_cannot_be_constructed_is_a_loss_too(tiny_model: Path, tmp_path: Path) -> None:
    """As when the disk is full for a moment; that of a first one is a mistake, which ends the run."""
    group, notes = started(tmp_path, tiny_model, ("hc",), restarts=2)
    kill_in_its_start(group.engines[0])
    group.wait_for_all()
    assert len(notes) == 2 and "No space left on device" in notes[1], notes
    group.abandon()
    (tmp_path / "first").mkdir()
    first, notes = started(tmp_path / "first", tiny_model, ("c",), restarts=2)
    with pytest.raises(ActorDiedError, match="No space left on device"):
        first.wait_for_all()
    assert notes == []
    first.abandon()


def test_an_engine_that_starts_slowly_is_not_taken_for_one_that_stands_still(tiny_model: Path, tmp_path: Path) -> None:
    """A start has a time-out of its own, and what was said in it is old when work begins."""
    from unit_tests.e2e.scripted_actor import SLOW_SECONDS

    group, notes = started(tmp_path, tiny_model, ("hs",), restarts=2, stall_seconds=SLOW_SECONDS / 2)
    kill_in_its_start(group.engines[0])
    group.on_restart = lambda _: None  # it gets its weights with the next load
    ask(group, "first")
    while not group.engines[0].is_started:
        group.collect(0.5)
    group.load_weights(1, {})
    assert len(collect_all(group)) == len(PROMPTS)
    assert len(notes) == 1, notes
    group.abandon()


def test_engines_are_closed_also_when_one_is_lost_in_the_end(tiny_model: Path, tmp_path: Path) -> None:
    group, notes = started(tmp_path, tiny_model, ("ok", "ok", "ok"), restarts=2, stall_seconds=6.0)
    group.wait_for_all()
    killed, frozen = (process_of(engine) for engine in group.engines[:2])
    os.kill(killed, signal.SIGKILL)
    os.kill(frozen, signal.SIGSTOP)
    group.close()
    assert [(tmp_path / f"{i}.closed").exists() for i in range(3)] == [False, False, True]
    assert len(notes) == 2 and "engine 0" in notes[0] and "engine 1" in notes[1]
    deadline = time.monotonic() + 60
    while any(map(is_alive, (killed, frozen))):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_lost_engines_groups_go_to_the_others_and_the_new_one_gets_the_weights(made: EnginePool) -> None:
    ids = ask(made, "first")
    assert [len(engine.outstanding) for engine in made.engines] == [4, 4, 4]
    slow = made.engines[2]
    left = set(slow.outstanding)
    began = time.monotonic()
    groups = made.collect(5.0)
    os.kill(process_of(slow), signal.SIGSTOP)
    assert {group.group_id for group in groups}.isdisjoint(left)
    groups += collect_all(made)
    assert sorted(group.group_id for group in groups) == sorted(ids)
    assert time.monotonic() - began < 60
    assert made.tally().means()["rollout/reasked_groups"] == 4
    made.load_weights(7, {})
    while slow.state != "usable":
        made.collect(0.5)
    assert versions_of(made) == [7, 7, 7]
    ids = ask(made, "second")
    groups = collect_all(made)
    assert sorted(group.group_id for group in groups) == sorted(ids)
    assert all((t.versions == 7).all() for group in groups for t in group.trajectories)


def test_new_engines_wait_for_weights_that_cannot_come_now(made: EnginePool) -> None:
    """As with nccl, when the trainer's weights have moved on: the next load brings them."""
    made.on_restart = lambda _: None
    made.load_weights(3, {})
    first = made.engines[0]
    ask(made, "first")
    os.kill(process_of(first), signal.SIGKILL)
    collect_all(made)
    deadline = time.monotonic() + 150
    while first.state != "started" and time.monotonic() < deadline:
        made.collect(0.5)
    ids = ask(made, "second")
    assert not first.outstanding, "it has no weights"
    assert sorted(g.group_id for g in collect_all(made)) == sorted(ids)
    assert len(made.load_weights(4, {})) == 3
    assert first.state == "usable"
    assert versions_of(made) == [4, 4, 4]


@pytest.mark.parametrize("late", ["ask", "withdraw"])
def test_what_a_refused_load_cut_off_is_asked_again_after_one_that_succeeds(made: EnginePool, late: str) -> None:
    """Whichever of an actor's calls is overtaken by those after it."""
    ray.get([actor.be_late.remote(**{late: 1.5}) for actor in made.actors])
    ids = ask(made, "first")
    groups = made.collect(0.2)
    with pytest.raises(WeightLoadError, match="checksum"):
        made.load_weights(1, {"refusal": "checksum"})
    assert [engine.state for engine in made.engines] == ["refused"] * 3
    groups += made.collect(1.0)
    made.load_weights(2, {})
    groups += collect_all(made)
    assert sorted(group.group_id for group in groups) == sorted(ids)
    assert "rollout/engine_restarts" not in made.tally().means()


def test_a_load_that_all_engines_are_lost_in_is_not_continued_by_those_that_follow(made: EnginePool) -> None:
    """A broadcast is for those who were there when it began."""
    made.restarts_left = 3
    for engine in made.engines:
        os.kill(process_of(engine), signal.SIGKILL)
    with pytest.raises(EngineLost, match="died"):
        made.load_weights(1, {})
    assert [engine.state for engine in made.engines] == ["starting"] * 3
    made.load_weights(2, {})
    made.wait_for_all()
    assert versions_of(made) == [2, 2, 2]


def test_a_loss_for_good_is_one_loss_whoever_meets_it_next(made: EnginePool) -> None:
    """The driver may be in the middle of a checkpoint, and go on for a while."""
    made.restarts_left = 0
    ask(made, "first")
    os.kill(process_of(made.engines[2]), signal.SIGKILL)
    said = []
    for _ in range(2):
        with pytest.raises(EnginesLost) as lost:
            collect_all(made)
        said.append(str(lost.value))
    assert "loss number 1 of this run, and failures.engine_restarts = 0. In order: engine 2 (pid " in said[0]
    assert said[1] == said[0]


def test_a_new_engine_that_does_not_take_the_weights_is_lost_too(made: EnginePool) -> None:
    """What is said of it is what the engine said, without the traceback that Ray adds."""
    notes: list[str] = []
    made.note, made.restarts_left = notes.append, 2
    refuse = lambda actor: ray.get(actor.load_weights.remote(1, {"refusal": "checksum"}))  # noqa: E731
    made.on_restart = refuse
    ask(made, "first")
    os.kill(process_of(made.engines[2]), signal.SIGKILL)
    collect_all(made)
    deadline = time.monotonic() + 150
    while len(notes) < 2 and time.monotonic() < deadline:
        made.collect(0.5)
        made.wait_a_moment()
    assert "engine 2 was started again and did not take the weights: checksum. " in notes[1]
    assert "Traceback" not in notes[1] and "ray::" not in notes[1]
