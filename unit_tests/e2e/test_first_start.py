"""The first start of a real engine: one that is lost in it is started again, one that says what is wrong ends the run."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from orchestration.cluster.watchdog import Watch
from orchestration.engines.handle import EngineHandle
from orchestration.engines.pool import EnginePool
from unit_tests.e2e.shared_stack import SharedStack
from unit_tests.e2e.test_failures import pid_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
SECONDS = 120


def alone(stack: SharedStack, folder: Path, model: str | None = None) -> tuple[EnginePool, list[str]]:
    """An engine of its own, on its way, and what is said of it."""
    (first, *_), notes = stack.actors.pool.engines, list[str]()
    _, engine, *others = first._arguments
    arguments = (str(folder / "engine.log"), {**engine, "model_path": model or engine["model_path"]}, *others)
    handle = EngineHandle("engine 7", first._actor_class, arguments, Watch(stall_seconds=60.0))
    return EnginePool([handle], handle.watch, 1, "recompute", notes.append), notes


def found(what: Callable[[], list[psutil.Process]]) -> psutil.Process:
    deadline = time.monotonic() + SECONDS
    while not (processes := what()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return processes[0]


def test_vllm_killed_in_its_first_start_is_started_again(stack: SharedStack, tmp_path: Path) -> None:
    group, notes = alone(stack, tmp_path)
    (engine,) = group.engines
    while engine.member.heartbeat is None:
        group.look(0.05)

    def cores() -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(pid_of(engine.member)).children(recursive=True)
            return [p for p in children if "EngineCore" in p.name()]
        return []

    found(cores).send_signal(signal.SIGKILL)
    group.wait_for_all()
    assert len(notes) == 1 and "engine 7 did not start: Engine core initialization failed" in notes[0]
    assert group.restarts_left == 0
    group.close()


def test_a_model_that_is_none_is_said_at_once(stack: SharedStack, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    group, notes = alone(stack, tmp_path, str(tmp_path / "empty"))
    with pytest.raises(Exception, match="empty"):
        group.wait_for_all()
    assert notes == [] and group.restarts_left == 1
    group.abandon()
