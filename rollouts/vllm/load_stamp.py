"""The load stamp says when a tensor last reached an engine's workers.

Workers load weights in processes of their own, which answer nothing meanwhile. The stamp shows whoever watches the
engine that a long load still moves.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Thing = TypeVar("Thing")

VARIABLE = "FEYNRL_LOAD_STAMP"  # the environment variable that tells workers where the stamp is
SECONDS = struct.Struct("d")


class LoadStamp:
    """The watcher's side: eight bytes of anonymous memory, which live as long as some process has them open."""

    def __init__(self) -> None:
        descriptor = os.memfd_create("feynrl-load-stamp")
        os.ftruncate(descriptor, SECONDS.size)
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self._memory = mmap.mmap(descriptor, SECONDS.size)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables with which the workers must be started."""
        return {VARIABLE: self.path}

    @property
    def seconds(self) -> float:
        """Return when the last tensor came, by the machine's monotonic clock; 0 before the first one."""
        (seconds,) = SECONDS.unpack(self._memory[:])
        return float(seconds)


def stamping() -> Callable[[Iterable[Thing]], Iterator[Thing]]:
    """Return a function for a worker that passes things on, and sets the stamp after each one."""
    path = os.environ.get(VARIABLE)
    if path is None:  # nobody watches this engine
        return iter
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), SECONDS.size)

    def stamped(things: Iterable[Thing]) -> Iterator[Thing]:
        for thing in things:
            yield thing
            SECONDS.pack_into(memory, 0, time.monotonic())

    return stamped
