"""A process that outlives the driver by a moment, to end what the driver leaves behind when it is killed.

Ray ends its own processes then, but not vLLM's under them, nor any that is stopped. Only this machine's are seen to: on
others Ray ends an actor's process group when the job's driver is gone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

LOOK_SECONDS = 5.0  # between two looks at who is there
GRACE_SECONDS = 5.0  # for processes to end by themselves


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Should this process be killed inside, its descendants are killed too, within seconds."""
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestration.cluster.orphan_reaper", str(os.getpid())],
        cwd=Path(__file__).resolve().parents[2],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C, and whatever ends the driver's process group, does not reach it
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def guard(driver: int) -> None:
    """Wait for the end of the parent process, and kill its descendants that are left."""
    seen: list[psutil.Process] = []
    looked = 0.0
    while os.getppid() == driver:
        if time.monotonic() - looked >= LOOK_SECONDS:
            seen, looked = descendants(driver) or seen, time.monotonic()
        time.sleep(0.5)
    time.sleep(GRACE_SECONDS)
    for process in [*seen, *in_groups_of(seen)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # psutil knows a process by its start too, not by its id alone
            process.kill()


def descendants(driver: int) -> list[psutil.Process]:
    """All of them but this process; none when the driver is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process for process in psutil.Process(driver).children(recursive=True) if process.pid != os.getpid()]
    return []


def in_groups_of(leaders: list[psutil.Process]) -> list[psutil.Process]:
    """Processes in a group that one of these leads: an actor's children that came after the last look."""
    groups, found = {process.pid for process in leaders}, []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) in groups:
                found.append(process)
    return found


if __name__ == "__main__":
    guard(int(sys.argv[1]))
