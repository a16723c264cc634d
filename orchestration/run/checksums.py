"""List the files of a finished checkpoint with their sizes and checksums, and find out which of them are damaged."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

MARKER = "checkpoint.json"  # file in every finished checkpoint; it says which run made it, at which step, of what files
STATES_KEPT = 2  # so that the older checkpoint can be resumed from when the newer one is damaged
BLOCK_BYTES = 1 << 22
Listed = dict[str, list[Any]]  # by path within the folder: size in bytes, checksum


class Damaged(ValueError):
    """The error of a checkpoint that is not as it was written. The message names what is wrong with which files."""


def checksum(path: Path, size: int | None = None) -> str:
    """Return XXH3 (128 bits) of a file's first `size` bytes (None: of all). It finds accidents, not forgeries."""
    digest, left = xxhash.xxh3_128(), path.stat().st_size if size is None else size
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(left, BLOCK_BYTES))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def sizes(folder: Path) -> dict[str, int]:
    """Return the size of every file in a folder and the folders in it, by its path within the folder."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


def listed(folder: Path) -> Listed:
    """Return every file of a folder with size and checksum; {} when there is no such folder."""
    found = sizes(folder)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        sums = threads.map(lambda name: checksum(folder / name), found)
        return {name: [size, sum_] for (name, size), sum_ in zip(found.items(), sums, strict=True)}


def complaints(folder: Path, expected: Listed) -> list[str]:
    """Return a sentence for every file that is not as it was listed. Files that were added since do not matter."""

    def complaint(name: str) -> str | None:
        path, (size, sum_) = folder / name, expected[name]
        try:
            if (now := path.stat().st_size) != size:
                return f"{path} has {now} bytes, {size} were written"
            return None if checksum(path) == sum_ else f"{path} holds other bytes than were written"
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:  # a folder in its place, or a disk that cannot read it
            return f"{path} cannot be read: {error.strerror}"

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return [text for text in threads.map(complaint, expected) if text is not None]


def write_marker(checkpoint: Path, marker: dict[str, Any]) -> None:
    """Write what `read_marker` returns."""
    text = json.dumps({**marker, "checksum": _own_checksum(marker)})
    (checkpoint / MARKER).write_text(text + "\n", encoding="utf-8")


def read_marker(checkpoint: Path) -> dict[str, Any]:
    """Return the marker of a finished checkpoint.

    It holds run_id and step, the listed `files` of the model and of the `state` for a resumed run, and size and
    checksum of the `metrics` written so far.

    Raises:
        Damaged: there is none, or it is not as it was written.
    """
    file = checkpoint / MARKER
    try:
        marker = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise Damaged(f"{file} is missing") from error
    except (ValueError, OSError) as error:
        raise Damaged(f"{file} is damaged ({error})") from error
    if not isinstance(marker, dict) or marker.pop("checksum", None) != _own_checksum(marker):
        raise Damaged(f"{file} is damaged, or of an earlier version of FeynRL, which listed no files in it")
    return marker


def check_checkpoint(folder: str | Path) -> bool:
    """Return whether the folder is a checkpoint of ours, after a check that its model is as it was written.

    Raises:
        Damaged: it is not.
    """
    folder = Path(folder)
    if not (folder / MARKER).exists():
        return False
    try:
        damage = complaints(folder, read_marker(folder)["files"])
    except Damaged as error:
        damage = [str(error)]
    if damage:
        raise Damaged(
            f"{shortened(damage)}; take another checkpoint, or remove {folder / MARKER} to use the files as they are"
        )
    return True


def shortened(texts: list[str]) -> str:
    """Return the first three texts as one, and how many more there are."""
    return "; ".join(texts[:3]) + (f"; and {len(texts) - 3} more" if len(texts) > 3 else "")


def check_parts(folder: Path, by_rank: list[dict[str, int]]) -> None:
    """Raise ValueError when a file that a trainer rank sees in the folder is not here with that size."""
    here = sizes(folder)
    for rank, files in enumerate(by_rank):
        for name, size in files.items():
            if here.get(name) != size:
                found = f"has {here[name]}" if name in here else "is missing"
                raise ValueError(
                    f"trainer rank {rank} wrote {folder / name} with {size} bytes, and here it {found}; put the run "
                    "directory (--run-dir) on storage that all machines share"
                )


def _own_checksum(marker: dict[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(marker, sort_keys=True).encode()).hexdigest()
