"""Real processes of a run are killed and frozen: an engine is replaced and nothing is lost, a trainer rank is named, and when
the driver dies nobody outlives it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import psutil
import pytest

from configs.load import method_for
from configs.schema import RLConfig
from orchestration.cluster import trainer_settings
from orchestration.devices import resolve
from orchestration.run_directory import RunDirectory
from orchestration.trainer_actor import TrainerGroup
from orchestration.update import prepare_updates
from orchestration.watchdog import EnginesLost, TrainerLost, Watch
from rollouts.records import Group
from rollouts.sampling import Sampling
from unit_tests.e2e.shared_stack import SharedStack

pytestmark = pytest.mark.e2e

SAMPLES = 32
SAMPLING = Sampling(max_new_tokens=8, seeded=True)  # asked again, a response is the same
STALL_SECONDS = 6.0


def tokens(groups: list[Group]) -> dict[tuple[str, int], list[int]]:
    return {(g.prompt.prompt_id, t.sample): t.token_ids.tolist() for g in groups for t in g.trajectories}


def beat_pid(member) -> int:
    """The process of a watched actor."""
    assert member.beat is not None
    return member.beat.pid


def core_of(pid: int) -> int:
    """vLLM's process under an engine's actor."""
    (core,) = [p.pid for p in psutil.Process(pid).children(recursive=True) if "EngineCore" in p.name()]
    return core


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@contextmanager
def quick_to_judge(watch: Watch) -> Iterator[None]:
    before, watch.stall_seconds = watch.stall_seconds, STALL_SECONDS
    yield
    watch.stall_seconds = before


@pytest.mark.parametrize(
    ("victim", "deadly", "said"),
    [("core", signal.SIGKILL, "SIGKILL"), ("actor", signal.SIGKILL, "died"), ("actor", signal.SIGSTOP, "not answered"),
     ("core", signal.SIGSTOP, "under way' for")],
)  # fmt: skip
def test_a_lost_engine_is_replaced_and_nothing_is_lost(stack: SharedStack, victim, deadly, said) -> None:
    config, rollouts = stack.small(), stack.actors.rollouts
    prompts = stack.prompts(config)[:48]
    expected = tokens(rollouts.generate(prompts, SAMPLES, SAMPLING, 0, "undisturbed").groups)
    engine, notes = rollouts.engines[0], []
    rollouts.restarts_left, rollouts.note = 1, notes.append
    rollouts.tally()
    actor = beat_pid(engine.member)
    core = core_of(actor)
    from orchestration.rollout_group import step_askings

    askings = step_askings(prompts, SAMPLES, f"{victim}-{deadly}", ())
    rollouts.ask(askings, SAMPLING, 0)
    groups = []
    while not groups:
        groups = rollouts.collect(5.0)
    assert rollouts.unfinished, "too late: all is generated"
    os.kill(core if victim == "core" else actor, deadly)
    began = time.monotonic()
    with quick_to_judge(rollouts.watch):
        while rollouts.unfinished:
            groups += rollouts.collect(5.0)
    print(f"{victim} {deadly.name}: {time.monotonic() - began:.1f} s", notes)
    assert tokens(groups) == expected
    assert len(groups) == len(prompts)
    assert all(t.reward is not None for g in groups for t in g.trajectories)
    assert len(notes) == 1
    assert said in notes[0] and "engine 0" in notes[0] and str(actor) in notes[0]
    assert rollouts.tally().means()["rollout/engine_restarts"] == 1
    assert is_gone(actor)
    assert is_gone(core)
