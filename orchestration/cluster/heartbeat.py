"""The heartbeat of an actor says what the actor is doing, and for how long nothing has moved in it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")
IDLE = "idle"


@dataclass(frozen=True)
class Heartbeat:
    """An actor's answer to the question whether it is alive."""

    phase: str  # what the actor is doing, in words
    still_seconds: float  # time since something last moved in it
    count: int  # how often something has moved so far
    pid: int  # also the id of its process group, which its children belong to
    node: str  # Ray's id of the machine
    host: str

    @property
    def place(self) -> str:
        """Name the process for a message."""
        return f"pid {self.pid} on {self.host}"


class Activity:
    """Keep what a process is doing. One thread sets it; another may read it at any time."""

    def __init__(self) -> None:
        self._node = ""
        # (phase, when it last moved, how often it moved). The tuple is replaced whole: no reader sees half of a change.
        self._state = (IDLE, time.monotonic(), 0)

    def enter(self, phase: str) -> None:
        """Note that something moved, and that `phase` is what is being done now."""
        self._state = (phase, time.monotonic(), self._state[2] + 1)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Enter `phase` for the length of the block, and become idle afterwards, also after an error."""
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(IDLE)

    def moved_by(self, items: Iterator[Item]) -> Iterator[Item]:
        """Pass the items on, and count each of them as something that moved in the present phase."""
        for item in items:
            self.enter(self._state[0])
            yield item

    def heartbeat(self) -> Heartbeat:
        """Return the heartbeat of this actor."""
        phase, since, count = self._state
        return self.heartbeat_of(phase, time.monotonic() - since, count)

    def heartbeat_of(self, phase: str, still_seconds: float, count: int) -> Heartbeat:
        """Return the heartbeat of an actor that measures these three numbers itself."""
        if not self._node:
            import ray  # late: a trainer outside Ray has an Activity too

            self._node = ray.get_runtime_context().get_node_id()
        return Heartbeat(phase, still_seconds, count, os.getpid(), self._node, socket.gethostname())
