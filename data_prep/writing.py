"""Write one output file: parquet in batches, what was left out and why, and the speed."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from array import array
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from data_prep.reading import BATCH_ROWS, as_text
from data_prep.recipe import BadRow, Row

PROGRESS_SECONDS = 5.0
SHOWN_BAD_ROWS = 20
# A row group is what a reader holds at once: large enough to read fast, small enough for images.
ROW_GROUP_ROWS = 32 * BATCH_ROWS
ROW_GROUP_BYTES = 16 << 20


class OutputFile:
    """A parquet file that takes rows one by one and holds a row group of them; a context manager."""

    def __init__(self, path: Path, columns: Mapping[str, pa.DataType]) -> None:
        self.path = path
        self.schema = pa.schema(list(columns.items()))
        self.rows = 0
        self._text = [name for name, kind in columns.items() if kind == pa.string()]
        self._digests = array("Q")  # 8 bytes a row: what repeats is counted without holding rows
        self._batch: list[Row] = []
        self._group: list[pa.Table] = []
        self._writer = parquet.ParquetWriter(path, self.schema, compression="zstd")

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_batch()
        self._write_group()
        self._writer.close()

    def add(self, row: Row, identity: bytes) -> None:
        """Take one row; columns it lacks become null. `identity` is a digest, of at least 8 bytes, of its prompt."""
        self._digests.append(int.from_bytes(identity[:8], "little"))
        self._batch.append(row | {name: as_text(row.get(name)) for name in self._text})
        self.rows += 1
        if len(self._batch) == BATCH_ROWS:
            self._close_batch()

    def repeated(self) -> int:
        """Return how many rows have the prompt of an earlier row."""
        return self.rows - len(np.unique(np.frombuffer(self._digests, dtype=np.uint64)))

    def _close_batch(self) -> None:
        if self._batch:
            self._group.append(pa.Table.from_pylist(self._batch, schema=self.schema))
            self._batch = []
        rows = sum(table.num_rows for table in self._group)
        if rows >= ROW_GROUP_ROWS or sum(table.nbytes for table in self._group) >= ROW_GROUP_BYTES:
            self._write_group()

    def _write_group(self) -> None:
        if self._group:
            self._writer.write_table(pa.concat_tables(self._group))
            self._group = []


class Tally:
    """The counts of rows read and left out, printed from time to time; every bad row also goes to a file of its own."""

    def __init__(self, recipe: str, bad_rows: Path, strict: bool) -> None:
        self.read = 0
        self.dropped: Counter[str] = Counter()
        self._recipe, self._bad_rows, self._strict = recipe, bad_rows, strict
        self._started = self._said = time.monotonic()

    def take(self) -> None:
        """Count a row read; from time to time print the number so far."""
        self.read += 1
        now = time.monotonic()
        if now - self._said >= PROGRESS_SECONDS:
            self._said = now
            rate = self.read / (now - self._started)
            print(f"{self._recipe}: {self.read:,} rows read ({rate:,.0f}/s)", file=sys.stderr, flush=True)

    def drop(self, bad: BadRow, file: str, row: int) -> None:
        """Count, show and write down a bad row. Raise ValueError naming it when bad rows are fatal."""
        where = f"{file} row {row}"
        if self._strict:
            raise ValueError(f"{where}: {bad}; without --strict it is left out and counted")
        self.dropped[bad.reason] += 1
        if self.dropped.total() <= SHOWN_BAD_ROWS:
            print(f"bad row: {where}: {bad}", file=sys.stderr)
        elif self.dropped.total() == SHOWN_BAD_ROWS + 1:
            print(f"further bad rows are only listed in {self._bad_rows.name}", file=sys.stderr)
        with self._bad_rows.open("a", encoding="utf-8") as file_of_bad:
            line = {"file": file, "row": row, "reason": bad.reason, "detail": bad.detail}
            file_of_bad.write(json.dumps(line, ensure_ascii=False) + "\n")


def digest(value: Any) -> bytes:
    """Return 16 bytes that stand for a cell or a row."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=_bytes_digest)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _bytes_digest(value: Any) -> str:
    return hashlib.blake2b(value, digest_size=16).hexdigest() if isinstance(value, bytes) else repr(value)
