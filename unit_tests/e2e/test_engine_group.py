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

from orchestration.cluster import started_ray
from orchestration.engine_handle import EngineHandle
from orchestration.rollout_group import RolloutGroup, step_askings
from orchestration.watchdog import EnginesLost, Watch
from rollouts.engine import WeightLoadError
from rollouts.records import Group, Prompt
from rollouts.sampling import Sampling

pytestmark = pytest.mark.e2e

SAMPLES = 2
SAMPLING = Sampling(max_new_tokens=8)
PROMPTS = [Prompt(f"p/{i}", [{"role": "user", "content": "a " * (1 + i)}]) for i in range(12)]


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    with started_ray():
        yield


@pytest.fixture
def made(tiny_model: Path, tmp_path: Path) -> Iterator[RolloutGroup]:
    """Three engines: two quick ones, and one that takes seconds for a response."""
    from unit_tests.e2e.scripted_actor import ScriptedActor

    watch = Watch(stall_seconds=6.0)
    actor_class = ray.remote(ScriptedActor).options(num_cpus=0)
    engines = [
        EngineHandle(f"engine {i}", actor_class, (str(tmp_path / f"{i}.log"), str(tiny_model), seconds), watch)
        for i, seconds in enumerate((0.05, 0.05, 1.0))
    ]
    group = RolloutGroup(engines, watch, 2, "recompute", note=print)
    watch.get([actor.start.remote() for actor in group.actors], "start", stall_seconds=300)
    yield group
    group.abandon()


def ask(group: RolloutGroup, label: str) -> list[str]:
    """All prompts; returns the ids of their groups."""
    askings = step_askings(PROMPTS, SAMPLES, label, ())
    group.ask(askings, SAMPLING, 1)
    return [asking.group_id for asking in askings]


def collect_all(group: RolloutGroup, seconds: float = 120.0) -> list[Group]:
    groups: list[Group] = []
    deadline = time.monotonic() + seconds
    while group.unfinished:
        assert time.monotonic() < deadline, f"{[a.group_id for a in group.unfinished]} did not come"
        groups += group.collect(1.0)
    return groups


def process_of(engine: EngineHandle) -> int:
    pid: int = ray.get(engine.actor.process.remote())
    return pid


def versions_of(group: RolloutGroup) -> list[Any]:
    return ray.get([actor.version.remote() for actor in group.actors])


def test_a_lost_engines_groups_go_to_the_others_and_the_new_one_gets_the_weights(made: RolloutGroup) -> None:
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


def test_new_engines_wait_for_weights_that_cannot_come_now(made: RolloutGroup) -> None:
    """As with nccl, when the trainer's weights have moved on: the next load brings them."""
    made.on_restart = lambda _: False
    made.load_weights(3, {})
    first = made.engines[0]
    ask(made, "first")
    os.kill(process_of(first), signal.SIGKILL)
    collect_all(made)
    deadline = time.monotonic() + 60
    while first.state != "started" and time.monotonic() < deadline:
        made.collect(0.5)
    ids = ask(made, "second")
    assert not first.outstanding, "it has no weights"
    assert sorted(g.group_id for g in collect_all(made)) == sorted(ids)
    assert len(made.load_weights(4, {})) == 3
    assert first.state == "usable"
    assert versions_of(made) == [4, 4, 4]


def test_what_a_refused_load_cut_off_is_asked_again_after_one_that_succeeds(made: RolloutGroup) -> None:
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


def test_a_loss_for_good_is_one_loss_whoever_meets_it_next(made: RolloutGroup) -> None:
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


def test_a_new_engine_that_does_not_take_the_weights_is_lost_too(made: RolloutGroup) -> None:
    """What is said of it is what the engine said, without the traceback that Ray adds."""
    notes: list[str] = []
    made.note, made.restarts_left = notes.append, 2
    refuse = lambda actor: ray.get(actor.load_weights.remote(1, {"refusal": "checksum"}))  # noqa: E731
    made.on_restart = refuse
    ask(made, "first")
    os.kill(process_of(made.engines[2]), signal.SIGKILL)
    collect_all(made)
    deadline = time.monotonic() + 60
    while len(notes) < 2 and time.monotonic() < deadline:
        made.collect(0.5)
        made.wait_a_moment()
    assert "engine 2 was started again and did not take the weights: checksum. " in notes[1]
    assert "Traceback" not in notes[1] and "ray::" not in notes[1]
