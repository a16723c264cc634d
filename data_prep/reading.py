"""Rows of one source file, a few at a time: parquet, JSON lines (also gzipped), or one JSON array.

A line that is no JSON object is a bad row with its number; a file that cannot be read on is a ValueError naming it.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar

import pyarrow as pa
from pyarrow import parquet

from data_prep.recipe import TEXT, BadRow, Row

BATCH_ROWS = 512
_CHUNK_CHARACTERS = 1 << 20
_GAP = re.compile(r"[ \t\r\n,]*")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
T = TypeVar("T")


def rows_of(path: Path) -> Iterator[tuple[int, Row | BadRow]]:
    """Rows with their number from 1: the line in JSON lines, the row or element otherwise."""
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    return _json_rows(path)


def fields_of(path: Path) -> dict[str, pa.DataType]:
    """Columns and their types. Of JSON by reading all of it once: a column of mixed types is text (JSON where it is not)."""
    if path.suffix == ".parquet":
        return {f.name: f.type for f in _open_parquet(path).schema_arrow}
    found: dict[str, pa.DataType] = {}
    for batch in batches(_json_rows(path)):
        rows = [row for _, row in batch if not isinstance(row, BadRow)]
        for name in dict.fromkeys(name for row in rows for name in row):
            found[name] = merged(found.get(name, pa.null()), _type_of([row.get(name) for row in rows]))
    return found


def batches(items: Iterable[T], size: int = BATCH_ROWS) -> Iterator[list[T]]:
    """Lists of at most `size`."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def merged(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """The type that holds both; text where there is none."""
    if one == other:
        return one
    schemas = [pa.schema([("x", one)]), pa.schema([("x", other)])]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field("x").type
    except pa.ArrowException:
        return TEXT


def as_text(value: Any) -> str | None:
    """A cell of a text column: text as it is, None as it is, anything else as JSON."""
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _type_of(values: list[Any]) -> pa.DataType:
    try:
        found = pa.array(values).type
    except (pa.ArrowException, OverflowError):  # mixed, or an integer beyond 64 bits
        return TEXT
    return found if _storable(found) else TEXT


def _storable(kind: pa.DataType) -> bool:
    """Parquet has no struct without fields."""
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
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig") as file:
        try:
            head = file.read(_CHUNK_CHARACTERS)
            while head.isspace() and (more := file.read(_CHUNK_CHARACTERS)):
                head += more
            if head.lstrip().startswith("["):
                yield from _array_elements(file, head, path)
            else:
                yield from _lines(file, head)
        except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: it is damaged, or not UTF-8 text: {error}") from error


def _lines(file: IO[str], head: str) -> Iterator[tuple[int, Row | BadRow]]:
    number = 0
    while head:
        *lines, rest = head.split("\n")
        more = file.read(_CHUNK_CHARACTERS)
        if not more:
            lines.append(rest)
        for line in lines:
            number += 1
            if line.strip():
                yield number, _line_row(line)
        head = rest + more if more else ""


def _line_row(line: str) -> Row | BadRow:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        return BadRow("not JSON", f"{error.msg} at column {error.colno}")
    return _checked(value, line)


def _array_elements(file: IO[str], head: str, path: Path) -> Iterator[tuple[int, Row | BadRow]]:
    """Elements of one JSON array, decoded one after the other from a moving window of the text."""
    decoder, number = json.JSONDecoder(), 0
    text = head[head.index("[") + 1 :]
    at, wanted = 0, _CHUNK_CHARACTERS
    while True:
        at = _GAP.match(text, at).end()  # type: ignore[union-attr]  # it matches the empty text
        if text[at : at + 1] == "]":
            return
        try:
            value, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            more = file.read(wanted)
            if not more:
                raise ValueError(f"{path}: element {number + 1} of the array is not JSON: {error.msg}") from error
            text, at, wanted = text[at:] + more, 0, 2 * wanted  # doubling keeps one huge element linear
            continue
        number += 1
        yield number, _checked(value, text[at:end])
        at, wanted = end, _CHUNK_CHARACTERS


def _checked(value: Any, text: str) -> Row | BadRow:
    if not isinstance(value, dict):
        return BadRow("not a JSON object", f"a {type(value).__name__}")
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return BadRow("broken text", "half of a surrogate pair")
    return value
