"""Rows of source files, and what makes one a bad row or an unreadable file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import reading
from data_prep.reading import fields_of, rows_of
from data_prep.recipe import BadRow

CELLS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab]},", max_size=3), inner, max_size=3),
    max_leaves=6,
)
ROWS = st.lists(st.dictionaries(st.text("xyz", min_size=1, max_size=2), CELLS, max_size=3), max_size=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@settings(max_examples=60)
@given(rows=ROWS, indent=st.sampled_from([None, 1]), plain=st.booleans())
def test_arrays_and_lines_of_json(folder: Path, rows: list[Any], indent: int | None, plain: bool) -> None:
    array = folder / "array.json"
    array.write_text(" " + json.dumps(rows, indent=indent, ensure_ascii=plain) + "\n", encoding="utf-8")
    assert list(rows_of(array)) == list(enumerate(rows, 1))
    lines = folder / "lines.jsonl.gz"
    lines.write_bytes(gzip.compress("\n".join(json.dumps(r, ensure_ascii=plain) for r in rows).encode()))
    assert list(rows_of(lines)) == list(enumerate(rows, 1))


@settings(max_examples=60)
@given(rows=ROWS)
def test_every_row_fits_the_columns_found(folder: Path, rows: list[Any]) -> None:
    path = folder / "fields.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    fields = fields_of(path)
    assert set(fields) == {name for row in rows for name in row}
    stored = [{n: reading.as_text(r.get(n)) if k == pa.string() else r.get(n) for n, k in fields.items()} for r in rows]
    if fields:
        table = pa.Table.from_pylist(stored, schema=pa.schema(list(fields.items())))
        assert table.num_rows == len(rows)


def test_lines_keep_their_numbers_and_bad_ones_say_why(folder: Path) -> None:
    path = folder / "nasty.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"a": 1}\r\n\n{"a": \n[1]\n"text"\n{"a": "\\ud83d"}\n{"a": "\\ud83d\\ude00"}\n{"a": 2}'
    )
    found = [(number, row.reason if isinstance(row, BadRow) else row) for number, row in rows_of(path)]
    assert found == [
        (1, {"a": 1}),
        (3, "not a JSON object"),
        (4, "not a JSON object"),
        (5, "not a JSON object"),
        (6, "broken text"),
        (7, {"a": "\U0001f600"}),
        (8, {"a": 2}),
    ]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("cut.json", b'[{"a": 1}, {"a": 2', "cut.json: it is damaged"),
        ("open.json", b'[{"a": 1}', "open.json: it is damaged"),
        ("latin.json", b'[{"a": "\xe9"}]', "latin.json: it is damaged, or not UTF-8 text"),
        ("cut.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 1000, mtime=0)[:-9], "cut.jsonl.gz: it is not readable as gzip"),
        ("plain.jsonl.gz", b'{"a": 1}\n', "plain.jsonl.gz: it is not readable as gzip"),
        ("bad.parquet", b"PAR1", "bad.parquet: it is not readable as parquet"),
    ],
)
def test_a_damaged_file_is_named(folder: Path, name: str, content: bytes, said: str) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        list(rows_of(folder / name))
