"""Read the rows of one source file: parquet, JSON lines (also gzipped), or one JSON array.

A line that is no JSON object is a bad row with its number; a file that cannot be read is a ValueError that names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import parquet

from data_feeds.reading.rows import JsonRows
from data_prep.recipe import TEXT, BadRow, Row

BATCH_ROWS = 512
T = TypeVar("T")


def rows_of(path: Path) -> Iterator[tuple[int, Row | BadRow]]:
    """Yield rows with their number from 1: the line in JSON lines, the row or element otherwise."""
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    return _json_rows(path)


def fields_of(path: Path) -> dict[str, pa.DataType]:
    """Return columns and types. JSON is read whole for them; a column of mixed types is text (JSON where it is not)."""
    if path.suffix == ".parquet":
        return {f.name: f.type for f in _open_parquet(path).schema_arrow}
    found: dict[str, pa.DataType] = {}
    for batch in batches(_json_rows(path)):
        rows = [row for _, row in batch if not isinstance(row, BadRow)]
        for name in dict.fromkeys(name for row in rows for name in row):
            found[name] = merged(found.get(name, pa.null()), _type_of([row.get(name) for row in rows]))
    return found


def batches(items: Iterable[T], size: int = BATCH_ROWS) -> Iterator[list[T]]:
    """Yield lists of at most `size` items."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def merged(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return the type that holds both; text where there is none."""
    if one == other:
        return one
    schemas = [pa.schema([("x", one)]), pa.schema([("x", other)])]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field("x").type
    except pa.ArrowException:
        return TEXT


def as_text(value: Any) -> str | None:
    """Return a cell of a text column: text as it is, None as it is, anything else as JSON."""
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _type_of(values: list[Any]) -> pa.DataType:
    try:
        found = pa.array(values).type
    except (pa.ArrowException, OverflowError):  # mixed, or an integer beyond 64 bits
        return TEXT
    return found if _storable(found) else TEXT


def _storable(kind: pa.DataType) -> bool:
    """Return whether parquet can store the type: it has no struct without fields."""
    if pa.types.is_struct(kind):
        return kind.num_fields > 0 and all(_storable(kind.field(i).type) for i in range(kind.num_fields))
    return not pa.types.is_list(kind) or _storable(kind.value_type)


def _open_parquet(path: Path) -> parquet.ParquetFile:
    try:
        return parquet.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: it is not readable as parquet: {error}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    number = 0
    for batch in _open_parquet(path).iter_batches(batch_size=BATCH_ROWS):
        for row in batch.to_pylist():
            number += 1
            yield number, row


def _json_rows(path: Path) -> Iterator[tuple[int, Row | BadRow]]:
    if path.suffix == ".json" and path.read_bytes().lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        yield from enumerate(map(_storable_row, _array(path)), 1)
        return
    lines = JsonRows(path)
    for index, row in enumerate(lines.all()):
        is_bad = isinstance(row, ValueError)
        yield lines.line(index), BadRow("not a JSON object", str(row)) if is_bad else _storable_row(row)


def _array(path: Path) -> list[Any]:
    """Return the elements of a file that is one JSON array; it is held in memory as a whole."""
    try:
        return list(json.loads(path.read_text(encoding="utf-8-sig")))
    except ValueError as error:
        raise ValueError(f"{path}: it is damaged, or not UTF-8 text: {error}") from error


def _storable_row(value: Any) -> Row | BadRow:
    if not isinstance(value, dict):
        return BadRow("not a JSON object", f"a {type(value).__name__}")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return BadRow("broken text", "half of a surrogate pair")
    return value
