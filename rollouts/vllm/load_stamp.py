"""When a tensor last reached an engine's workers. They load weights in processes of their own, which answer nothing meanwhile;
whoever watches the engine can see by this that a long load moves."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Thing = TypeVar("Thing")

VARIABLE = "FEYNRL_LOAD_STAMP"  # of the environment: where workers find the stamp
SECONDS = struct.Struct("d")


class LoadStamp:
    """The watcher's end: eight bytes without a name, that live as long as somebody has them open."""

    def __init__(self) -> None:
        descriptor = os.memfd_create("feynrl-load-stamp")
        os.ftruncate(descriptor, SECONDS.size)
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self._memory = mmap.mmap(descriptor, SECONDS.size)

    @property
    def environment(self) -> dict[str, str]:
        """To start the workers with."""
        return {VARIABLE: self.path}

    @property
    def seconds(self) -> float:
        """By the machine's monotonic clock; 0 before the first tensor."""
        (seconds,) = SECONDS.unpack(self._memory[:])
        return float(seconds)


def stamping() -> Callable[[Iterable[Thing]], Iterator[Thing]]:
    """For a worker: a function that gives the same things, and sets the stamp whenever one is done with."""
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
