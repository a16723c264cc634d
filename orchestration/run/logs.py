"""Keep the libraries' output off the screen, in files of the run directory that can be read after a failure."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def redirect_output_to(path: str | Path) -> None:
    """Append whatever this process, its libraries and its children print from now on to `path`. Actors call this.

    File descriptors 1 and 2 are redirected, so that the output of C libraries and child processes is caught as well.
    """
    descriptor = _open_log(path)
    _point_output_at(descriptor, descriptor)
    os.close(descriptor)


@contextmanager
def captured_output(path: str | Path) -> Iterator[TextIO]:
    """Redirect all output to `path` during the block, and yield a stream to what was standard output before.

    The driver's console writes to that stream, and nothing else reaches the screen. After the block, also after an
    exception, standard output and error are as they were.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    screen = os.fdopen(os.dup(saved[0]), "w", encoding="utf-8", errors="replace", buffering=1)
    try:
        redirect_output_to(path)
        yield screen
    finally:
        _point_output_at(*saved)
        for descriptor in saved:
            os.close(descriptor)
        screen.close()


def _open_log(path: str | Path) -> int:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def _point_output_at(standard_output: int, standard_error: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(standard_output, 1)
    os.dup2(standard_error, 2)
