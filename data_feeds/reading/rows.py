"""Read rows that stay on disk, one by its number or all in order, in bounded memory.

A JSON file is mapped into memory, with an index of its lines (16 bytes each). Single rows of a parquet file cannot be
reached, so it is copied once into an Arrow file that is mapped. A Hugging Face data set is mapped by its own library.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import mmap
import os
import shutil
import tempfile
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

Columns = dict[str, Any]
BATCH_ROWS = 1000


class Rows(Protocol):
    """The rows of one source."""

    columns: dict[str, str] | None  # the types by name where the format knows them; None when each row has its own

    def __len__(self) -> int: ...

    def read(self, index: int) -> Columns:
        """Return row `index` (0-based).

        Raises:
            ValueError: the row cannot be read; the message names it.
        """
        ...

    def where(self, index: int) -> str:
        """Name the row for messages: the file and the 1-based row or line."""
        ...

    def all(self) -> Iterator[Columns | ValueError]:
        """Yield every row in order; for a row that cannot be read, yield the ValueError that says why."""
        ...


class JsonRows:
    """A file with one JSON object per line. Empty lines are no rows. A .gz file is unpacked into a temporary file."""

    columns: dict[str, str] | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts, self._lines = array("q"), array("q")
        with _unpacked(path) as file:
            position = 0
            for number, line in enumerate(file, 1):
                if line.strip():
                    self._starts.append(position)
                    self._lines.append(number)
                position += len(line)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if position else None

    def __len__(self) -> int:
        return len(self._starts)

    def line(self, index: int) -> int:
        """Return the row's line in the file, counted from 1."""
        return self._lines[index]

    def where(self, index: int) -> str:
        return f"{self.path} line {self.line(index)}"

    def read(self, index: int) -> Columns:
        assert self._map is not None
        start = self._starts[index]
        end = self._map.find(b"\n", start)
        return self._parse(self._map[start : end if end >= 0 else len(self._map)], index)

    def all(self) -> Iterator[Columns | ValueError]:
        for index in range(len(self)):
            try:
                yield self.read(index)
            except ValueError as error:
                yield error

    def _parse(self, line: bytes, index: int) -> Columns:
        try:
            row = json.loads(line.decode("utf-8-sig"))  # a mark of the byte order may stand before the first
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.where(index)}: it is not UTF-8 text: {error}") from error
        except RecursionError as error:
            raise ValueError(f"{self.where(index)}: its values are nested too deep; flatten them") from error
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{self.where(index)}: not a JSON object on one line: {error.msg} at column {error.colno}"
            ) from error
        except ValueError as error:  # a number of more digits than Python reads
            raise ValueError(f"{self.where(index)}: a value cannot be read: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(
                f"{self.where(index)}: every line must be a JSON object, but this one is a {type(row).__name__}"
            )
        return row


class ParquetRows:
    """A parquet file, read through a mapped Arrow copy in `cache_dir` that all processes of a machine share."""

    def __init__(self, path: Path, cache_dir: Path) -> None:
        import pyarrow
        from pyarrow import ipc, parquet

        self.path = path
        try:
            with parquet.ParquetFile(path) as file:
                self.columns: dict[str, str] | None = {f.name: str(f.type) for f in file.schema_arrow}
                copy = _copy_path(path, cache_dir)
                if not copy.is_file():
                    _write_arrow(file, copy)
        except (pyarrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
                raise ValueError(
                    f"data file {path}: its Arrow copy cannot be written into {cache_dir}: {said(error)}; set "
                    "data.cache_dir (in a supervised job) or XDG_CACHE_HOME to a folder with space"
                ) from error
            raise ValueError(f"data file {path}: it is not readable as parquet: {said(error)}") from error
        try:
            reader = ipc.open_file(pyarrow.memory_map(str(copy)))
            self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
            for batch in self._batches:
                batch.validate()
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(
                f"data file {path}: its Arrow copy {copy} is damaged: {said(error)}; remove that file, and it is made "
                "anew"
            ) from error
        self._starts = [0]
        for batch in self._batches:
            self._starts.append(self._starts[-1] + batch.num_rows)

    def __len__(self) -> int:
        return self._starts[-1]

    def where(self, index: int) -> str:
        return f"{self.path} row {index + 1}"

    def read(self, index: int) -> Columns:
        batch = bisect_right(self._starts, index) - 1
        return dict(self._batches[batch].slice(index - self._starts[batch], 1).to_pylist()[0])

    def all(self) -> Iterator[Columns | ValueError]:
        for batch in self._batches:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield from batch.slice(start, BATCH_ROWS).to_pylist()


class DatasetRows:
    """A split of a Hugging Face data set."""

    def __init__(self, name: str, split: str, subset: str | None, revision: str | None) -> None:
        self.name = name
        self._data = _load_dataset(name, split, subset, revision)
        self.columns: dict[str, str] | None = {n: str(f) for n, f in self._data.features.items()}

    def __len__(self) -> int:
        return len(self._data)

    def where(self, index: int) -> str:
        return f"{self.name} row {index + 1}"

    def read(self, index: int) -> Columns:
        return dict(self._data[index])

    def all(self) -> Iterator[Columns | ValueError]:
        for batch in self._data.iter(BATCH_ROWS):
            for cells in zip(*batch.values(), strict=True):
                yield dict(zip(batch, cells, strict=True))


def _load_dataset(name: str, split: str, subset: str | None, revision: str | None) -> Any:
    import datasets

    folder = Path(name)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            saved = datasets.load_from_disk(name)
            if isinstance(saved, datasets.Dataset):
                return saved
            if split not in saved:
                raise ValueError(f"there is no split '{split}'; there are: {', '.join(saved)}")
            return saved[split]
        return datasets.load_dataset(name, subset, split=split, revision=revision)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        way = "check split, subset and revision" if folder.is_dir() else "it is no folder here; as a hub name, check it"
        raise ValueError(f"data set {name}: it cannot be loaded: {said(error)}; {way}") from error


def cache_folder(cache_dir: str | None) -> Path:
    """Return the folder for Arrow copies: the given one, or one in this user's own cache, where nobody else can put
    rows."""
    if cache_dir is not None:
        return Path(cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "feynrl" / "rows"


def _copy_path(path: Path, cache_dir: Path) -> Path:
    """Return the path of a file's copy. It depends on path, size and time of change: a changed file gets a new copy."""
    stat = path.stat()
    key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    return cache_dir / f"{path.stem}_{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}.arrow"


def _write_arrow(file: Any, copy: Path) -> None:
    """Copy batch by batch. The copy appears complete or not at all, even when several processes write it."""
    from pyarrow import ipc

    copy.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=copy.parent, suffix=".part", delete=False) as part:
        try:
            with ipc.new_file(part, file.schema_arrow) as writer:
                for batch in file.iter_batches(batch_size=BATCH_ROWS):
                    writer.write_batch(batch)
            part.flush()
            os.replace(part.name, copy)
        finally:
            Path(part.name).unlink(missing_ok=True)


def _unpacked(path: Path) -> Any:
    """Open the file for reading; a .gz file is unpacked into a temporary one that disappears when it is closed."""
    if path.suffix.lower() != ".gz":
        return path.open("rb")
    plain = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        with gzip.open(path) as packed:
            shutil.copyfileobj(packed, plain)
    except (OSError, EOFError, zlib.error) as error:
        plain.close()
        raise ValueError(f"data file {path}: it is not readable as gzip: {said(error)}") from error
    plain.seek(0)
    return plain


def said(error: Exception) -> str:
    """Return the text of an error, or its type when it has no text."""
    return str(error).strip() or type(error).__name__
