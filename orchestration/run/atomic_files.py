"""Write files so that they are complete or absent, whatever happens meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def not_hiding(error: BaseException) -> Iterator[None]:
    """Keep `error` the one that is raised, even if the block, which writes something because of it, cannot write.

    An OSError in the block, as on a full disk, becomes a note on `error`.
    """
    try:
        yield
    except OSError as refusal:
        error.add_note(f"and what was to be kept could not be written: {refusal}")


@contextmanager
def afterwards(write: Callable[[], object]) -> Iterator[None]:
    """Call `write` after the block, also when the block ends in an error; that error is then the one raised."""
    try:
        yield
    except BaseException as error:
        with not_hiding(error):
            write()
        raise
    write()


def write_atomically(path: Path, text: str) -> None:
    """Write a file in such a way that readers see the old text or the new one, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    # Text of a model or a data set may hold a lone surrogate. It is written as \\udXXX, which JSON reads back
    # unchanged.
    with open(partial, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in files:
            fsync_file(Path(folder) / name)
        fsync_file(Path(folder))
