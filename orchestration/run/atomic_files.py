"""Files that are complete or absent, whatever happens while they are written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def not_hiding(error: BaseException) -> Iterator[None]:
    """Inside, something is to be written because of an error. Where the system does not let it, as on a full disk, the error
    that came first gets a note, and is still the one to be raised."""
    try:
        yield
    except OSError as refusal:
        error.add_note(f"and what was to be kept could not be written: {refusal}")


@contextmanager
def afterwards(write: Callable[[], object]) -> Iterator[None]:
    """Calls `write` after the block, also when it ends in an error, which is the one to be raised."""
    try:
        yield
    except BaseException as error:
        with not_hiding(error):
            write()
        raise
    write()


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the new one, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    # A lone surrogate in a model's or data set's text is written as \\udXXX, which JSON reads back as it was.
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
