"""Let Ctrl-C and SIGTERM wait until a checkpoint is written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """The error by which a driver leaves its work to write a checkpoint, because it was asked to end."""


@contextmanager
def finishing_first(grace_seconds: float) -> Iterator[Callable[[], bool]]:
    """Note the first Ctrl-C or SIGTERM in the block; the function that is yielded returns whether there was one.

    The block should then write a checkpoint and end. KeyboardInterrupt is raised wherever it is after `grace_seconds`,
    and at another signal.
    """
    asked = False

    def leave(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    def note(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        signal.setitimer(signal.ITIMER_REAL, grace_seconds)

    if grace_seconds == 0 or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = [(number, signal.signal(number, note)) for number in SIGNALS]
    before.append((signal.SIGALRM, signal.signal(signal.SIGALRM, leave)))
    try:
        yield lambda: asked
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before:
            signal.signal(number, handler)
