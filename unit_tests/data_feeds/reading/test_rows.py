"""Rows on disk: any one by its number is the one read in order."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from data_feeds.reading import rows
from data_feeds.reading.rows import JsonRows, ParquetRows, cache_folder

objects = st.dictionaries(st.text(max_size=3), st.one_of(st.none(), st.integers(), st.text(max_size=9)), max_size=3)


@settings(max_examples=40)
@given(st.lists(st.one_of(objects, st.just(None)), max_size=12), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_json_lines(tmp_path_factory: pytest.TempPathFactory, table: list[dict | None], end: str, ended: bool) -> None:
    text = end.join("" if row is None else json.dumps(row, ensure_ascii=False) for row in table) + end * ended
    plain = tmp_path_factory.mktemp("json") / "a.jsonl"
    plain.write_bytes(text.encode())
    packed = plain.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(text.encode()))
    for path in (plain, packed):
        made = JsonRows(path)
        wanted = [(i, row) for i, row in enumerate(table, 1) if row is not None]
        assert len(made) == len(wanted) and list(made.all()) == [row for _, row in wanted]
        for index in reversed(range(len(wanted))):
            assert made.read(index) == wanted[index][1]
            assert made.where(index) == f"{path} line {wanted[index][0]}"


@settings(max_examples=15)
@given(st.integers(0, 70), st.integers(1, 30), st.integers(1, 30))
def test_parquet_rows(tmp_path_factory: pytest.TempPathFactory, count: int, group: int, batch: int) -> None:
    folder = tmp_path_factory.mktemp("parquet")
    table = [{"n": i, "chat": [{"role": "user", "content": "x" * i}]} for i in range(count)]
    schema = pa.schema(
        [("n", pa.int64()), ("chat", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])))]
    )
    parquet.write_table(pa.Table.from_pylist(table, schema), folder / "a.parquet", row_group_size=group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "BATCH_ROWS", batch)
        made = ParquetRows(folder / "a.parquet", folder / "cache")
        assert len(made) == count and list(made.all()) == table
        assert [made.read(i) for i in reversed(range(count))] == table[::-1]
    assert [p.suffix for p in (folder / "cache").iterdir()] == [".arrow"], "nothing half-written is left"


def test_a_copy_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet.write_table(pa.table({"n": list(range(5))}), tmp_path / "a.parquet")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rows.os, "replace", full)
    with pytest.raises(
        ValueError,
        match=r"a.parquet: its Arrow copy cannot be written into .*cache: .*No space left.*set data.cache_dir",
    ):
        ParquetRows(tmp_path / "a.parquet", tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_the_default_cache_is_this_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder(str(tmp_path)) == tmp_path
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / ".cache" / "feynrl" / "rows", "no folder that another user may make first"


def test_a_damaged_copy_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"a": [1, 2]}), path)
    ParquetRows(path, tmp_path / "cache")
    (copy,) = (tmp_path / "cache").iterdir()
    copy.write_bytes(b"x" * copy.stat().st_size)
    with pytest.raises(ValueError, match=f"{path}: its Arrow copy {copy} is damaged: .*; remove that file"):
        ParquetRows(path, tmp_path / "cache")


@pytest.mark.parametrize(
    ("line", "said"),
    [("[" * 100_000, "nested too deep"), ("9" * 5000, "cannot be read"), ("[]", "must be a JSON object")],
)
def test_lines_that_are_no_rows_are_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{}}\n{{"a": {line}\n' if line != "[]" else f"{{}}\n{line}\n")
    with pytest.raises(ValueError, match=f"{path} line 2: .*{said}"):
        JsonRows(path).read(1)


def test_a_damaged_gzip_stream_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(json.dumps({"a": "b" * 1000}).encode())
    path.write_bytes(whole[:10] + b"\xff" * 20 + whole[30:])
    with pytest.raises(ValueError, match=f"data file {path}: it is not readable as gzip"):
        JsonRows(path)
