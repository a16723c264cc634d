"""Reward functions that do what reward functions should not. Used by test_service.py; imported in its processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from plugins.marks import of_group
from rewards.scoring.counted import Counted


def by_response(trajectory: Any, folder: str = "") -> Any:
    """Do what the response says."""
    return globals()[trajectory.response](folder)


def good(folder: str) -> float:
    return 0.5


def slow_good(folder: str) -> float:
    time.sleep(2.0)
    return 0.5


def parts(folder: str) -> dict[str, Any]:
    return {"right": True, "short": np.float32(0.25)}


def sleep_forever(folder: str) -> float:
    time.sleep(10**6)
    return 1.0


def ignore_sigterm(folder: str) -> float:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass


LOADED: list[bool] = []


def loads(trajectory: Any) -> float:
    """Take two seconds in a process's first score."""
    if not LOADED:
        time.sleep(2.0)
        LOADED.append(True)
    return 0.5


def leave_a_child(folder: str) -> float:
    child = subprocess.Popen(["sleep", "1000"])
    Path(folder, "pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(10**6)
    return 1.0


def os_exit(folder: str) -> float:
    os._exit(0)


def sys_exit(folder: str) -> float:
    raise SystemExit(0)


def segfault(folder: str) -> float:
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(10)
    return 1.0


def fail(folder: str) -> float:
    raise KeyError("the column nobody has")


def nan(folder: str) -> float:
    return float("nan")


def infinite(folder: str) -> dict[str, float]:
    return {"fine": 1.0, "huge": float("inf")}


def text(folder: str) -> Any:
    return "0.7"


def nothing(folder: str) -> Any:
    return None


def empty(folder: str) -> Any:
    return {}


def shout(folder: str) -> float:
    for _ in range(20000):
        print("x" * 100)
    return 1.0


def read_input(folder: str) -> float:
    input()
    return 1.0


def pid(folder: str) -> float:
    return float(os.getpid())


async def awaited(trajectory: Any) -> float:
    await asyncio.sleep(0.01)
    return 0.75


async def by_response_async(trajectory: Any, folder: str = "") -> Any:
    """Do what the response says, side by side with others: a function of this file, or one of those below."""
    return await ASYNC[trajectory.response](trajectory)


async def nap(trajectory: Any) -> float:
    await asyncio.sleep(0.3)
    return float(os.getpid())


async def await_forever(trajectory: Any) -> float:
    await asyncio.sleep(10**6)
    return 1.0


async def refuse_to_be_cancelled(trajectory: Any) -> float:
    while True:
        try:
            await asyncio.sleep(10**6)
        except asyncio.CancelledError:
            continue


async def block_the_loop(trajectory: Any) -> float:
    time.sleep(10**6)
    return 1.0


async def exit_process(trajectory: Any) -> float:
    await asyncio.sleep(0.1)
    os._exit(3)


async def raise_exit(trajectory: Any) -> float:
    raise SystemExit(1)


async def cancel_itself(trajectory: Any) -> float:
    raise asyncio.CancelledError


ASYNC = {
    f.__name__: f
    for f in (nap, await_forever, refuse_to_be_cancelled, block_the_loop, exit_process, raise_exit, cancel_itself)
}


def needs_the_main_thread(trajectory: Any) -> float:
    """An event loop of its own, and signals, work in the main thread only."""
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    return asyncio.run(awaited(trajectory))


def slow(trajectory: Any) -> float:
    time.sleep(0.3)
    return 1.0


def counted(trajectory: Any) -> Counted:
    return Counted({"a": 1.0, "b": 0.5}, {"tokens": 100.0})


def one(trajectory: Any) -> float:
    return 1.0


def mutate(trajectory: Any) -> float:
    trajectory.response = "changed"
    trajectory.prompt.messages.clear()
    return 1.0


@of_group
def rank(group: Any) -> list[Any]:
    """Each member's place by what it was paid so far, as a named number."""
    paid = sorted(t.reward for t in group.trajectories if t.reward is not None)
    return [{"place": paid.index(t.reward) if t.reward is not None else -1} for t in group.trajectories]


@of_group
async def by_first_response(group: Any) -> Any:
    """What the first response says: a list that is wrong in some way, or none."""
    first = group.trajectories[0].response
    if first == "hang":
        await asyncio.sleep(10**6)
    if first == "fail":
        raise KeyError("the column nobody has")
    if first == "die":
        os._exit(3)
    return {"short": [1.0], "number": 1.0, "text": ["a"] * len(group.trajectories), "part": [1.0, "a", float("nan")]}[
        first
    ]
