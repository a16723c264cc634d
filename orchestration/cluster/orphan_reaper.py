"""The orphan reaper is a process that kills what the driver leaves behind when the driver itself is killed.

Ray ends its own processes then, but neither vLLM's below them nor stopped ones. The reaper looks after this machine
only: on others Ray ends an actor's process group when the job's driver is gone.
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

LOOK_SECONDS = 5.0  # between two lists of the driver's descendants
GRACE_SECONDS = 5.0  # in which processes may end by themselves


@contextlib.contextmanager
def orphan_reaper() -> Iterator[None]:
    """Run an orphan reaper: if this process is killed inside the block, its descendants are killed seconds later."""
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestration.cluster.orphan_reaper", str(os.getpid())],
        cwd=Path(__file__).resolve().parents[2],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # neither Ctrl-C nor the end of the driver's process group reaches it
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def reap_orphans(driver_pid: int) -> None:
    """Wait until the driver, our parent process, has ended; then kill those of its descendants that are left."""
    orphans: list[psutil.Process] = []
    last_look = 0.0
    while os.getppid() == driver_pid:
        if time.monotonic() - last_look >= LOOK_SECONDS:
            orphans, last_look = descendants(driver_pid) or orphans, time.monotonic()
        time.sleep(0.5)
    time.sleep(GRACE_SECONDS)
    for process in [*orphans, *in_groups_of(orphans)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # psutil checks the start time, so no reused id is killed
            process.kill()


def descendants(driver_pid: int) -> list[psutil.Process]:
    """Return all descendants of the driver but this process; none when the driver is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [
            process for process in psutil.Process(driver_pid).children(recursive=True) if process.pid != os.getpid()
        ]
    return []


def in_groups_of(leaders: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes whose group one of `leaders` leads: an actor's children that came after the last look."""
    groups, members = {process.pid for process in leaders}, []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) in groups:
                members.append(process)
    return members


if __name__ == "__main__":
    reap_orphans(int(sys.argv[1]))
