"""An actor's sign of life: what it is doing, and for how long nothing has moved in it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

Thing = TypeVar("Thing")
IDLE = "idle"


@dataclass(frozen=True)
class Heartbeat:
    """One answer to "are you alive?"."""

    phase: str  # what it is doing, in words
    still_seconds: float  # since something last moved in it
    count: int  # things that have moved so far
    pid: int  # also its process group: its children are in it
    node: str  # Ray's id of the machine
    host: str

    @property
    def place(self) -> str:
        """The process, in words."""
        return f"pid {self.pid} on {self.host}"


class Activity:
    """What a process is doing. One thread sets it, another may read it at any time."""

    def __init__(self) -> None:
        self._node = ""
        self._state = (IDLE, time.monotonic(), 0)  # replaced whole, so that a reader never sees half of a change

    def enter(self, phase: str) -> None:
        """Something moved: this is done now."""
        self._state = (phase, time.monotonic(), self._state[2] + 1)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Inside, this is done, or what `enter` says; nothing afterwards, also after an error."""
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(IDLE)

    def moved_by(self, things: Iterator[Thing]) -> Iterator[Thing]:
        """The same things; each one is something that moved, in the phase that was entered before."""
        for thing in things:
            self.enter(self._state[0])
            yield thing

    def heartbeat(self) -> Heartbeat:
        """For actors: how it is now."""
        phase, since, count = self._state
        return self.heartbeat_of(phase, time.monotonic() - since, count)

    def heartbeat_of(self, phase: str, still_seconds: float, count: int) -> Heartbeat:
        """For actors that know by themselves how they are."""
        if not self._node:
            import ray  # late: the trainer of a plain process has a pulse, and no Ray

            self._node = ray.get_runtime_context().get_node_id()
        return Heartbeat(phase, still_seconds, count, os.getpid(), self._node, socket.gethostname())
