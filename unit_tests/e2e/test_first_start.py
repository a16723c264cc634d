"""The first start of a real engine: one that is lost in it is started again (scripted ones: test_engine_pool)."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from orchestration.cluster.watchdog import Watch
from orchestration.engines.handle import EngineHandle
from orchestration.engines.pool import EnginePool
from unit_tests.e2e.shared_stack import SharedStack
from unit_tests.e2e.test_failures import pid_of
from unit_tests.waiting import wait_for

pytestmark = pytest.mark.e2e


def cores_of(engine: EngineHandle) -> list[psutil.Process]:
    """Return vLLM's process under the engine's actor, if it is there."""
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(pid_of(engine.member)).children(recursive=True)
        return [p for p in children if "EngineCore" in p.name()]
    return []


def test_vllm_killed_in_its_first_start_is_started_again(stack: SharedStack, tmp_path: Path) -> None:
    """Alone catches a death of vLLM in its start that is not read from what vLLM says, and ends the run as a mistake."""
    (first, *_), notes = stack.actors.pool.engines, list[str]()
    arguments = (str(tmp_path / "engine.log"), *first._arguments[1:])
    engine = EngineHandle("engine 7", first._actor_class, arguments, Watch(stall_seconds=60.0))
    pool = EnginePool([engine], engine.watch, 1, "recompute", notes.append)
    wait_for(lambda: pool.look(0.05) or engine.member.heartbeat, "the actor has answered")
    wait_for(lambda: cores_of(engine), "vLLM's process is there")[0].send_signal(signal.SIGKILL)
    pool.wait_for_all()
    assert len(notes) == 1 and "engine 7 did not start: Engine core initialization failed" in notes[0]
    assert pool.restarts_left == 0
    pool.close()
