"""Waiting for what real processes bring about: no fixed time, and patience enough for a slow and busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psutil

T = TypeVar("T")
PATIENCE_SECONDS = 240.0


def wait_for(condition: Callable[[], T], event: str, every_seconds: float = 0.05) -> T:
    """Return the condition's value as soon as it is true. Raise AssertionError, naming the event, when it does not become so."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, f"this did not happen within {PATIENCE_SECONDS:.0f} s: {event}"
        time.sleep(every_seconds)
    return value


def is_alive(pid: int) -> bool:
    """Return whether the process runs or is stopped; one that has ended and was not waited for is not alive."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
