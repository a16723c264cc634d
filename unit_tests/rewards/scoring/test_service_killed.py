"""Scoring processes are killed from outside, as the kernel does when memory runs out: their samples are scored again."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from configs.blocks.rl import Reward
from records.rollout import Prompt, Trajectory
from rewards.scoring.service import ScoringService


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def trajectory(response: str) -> Trajectory:
    return Trajectory(
        Prompt("p/0", [{"role": "user", "content": "?"}], "4"), "g", 0, np.zeros(2, np.int32), np.zeros(1, np.int32),
        np.zeros(1, np.float32), np.zeros(1, np.int32), np.ones(1, np.bool_), np.zeros(1, np.int32), response=response,
        finish_reason="stop",
    )  # fmt: skip


def scoring_processes() -> set[int]:
    return {p.pid for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE}


async def killed_while_scoring(
    service: ScoringService, responses: list[str], kills: int, before: set[int]
) -> list[Trajectory]:
    """Score all at once; `kills` times the process that has come last is killed in the middle of it. before: other children of
    this process."""
    calls = [asyncio.create_task(service.score(trajectory(response))) for response in responses]
    for _ in range(kills):
        while not (new := scoring_processes() - before):
            await asyncio.sleep(0.05)
        before |= new
        (pid,) = new
        while psutil.Process(pid).cpu_times().user < 0.02:  # it is still to import what it needs
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
    return list(await asyncio.gather(*calls))


def run(responses: list[str], kills: int, **settings: Any) -> list[Trajectory]:
    part = {"function": "hostile_rewards:by_response"}

    async def all_of_it() -> list[Trajectory]:
        before = scoring_processes()
        service = ScoringService(Reward(parts=[part], timeout_seconds=60.0, **settings))  # type: ignore[list-item]
        await service.start()
        try:
            return await killed_while_scoring(service, responses, kills, before)
        finally:
            await service.close()

    return asyncio.run(all_of_it())


def test_a_sample_whose_process_is_killed_is_scored_again() -> None:
    done = run(["slow_good"] * 3, kills=1)
    assert [t.reward for t in done] == [0.5] * 3
    assert all(t.reward_error is None for t in done)


def test_a_sample_whose_process_is_killed_twice_is_an_error() -> None:
    (done,) = run(["slow_good"], kills=2)
    assert done.reward is None
    assert "its process died (signal SIGKILL)" in (done.reward_error or "")
