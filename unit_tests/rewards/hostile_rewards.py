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


def by_response(trajectory: Any, folder: str = "") -> Any:
    """Do what the response says."""
    return globals()[trajectory.response](folder)


def good(folder: str) -> float:
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


def one(trajectory: Any) -> float:
    return 1.0


def mutate(trajectory: Any) -> float:
    trajectory.response = "changed"
    trajectory.prompt.messages.clear()
    return 1.0
