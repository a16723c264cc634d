"""The loading benchmark counts what it says."""

from __future__ import annotations

from pathlib import Path

from pyarrow import parquet

from benchmarks import load_rows
from unit_tests.data_feeds.chat.chat_families import CHATML, IM, byte_level


def test_every_row_is_distinct_and_drawn_once(tmp_path: Path) -> None:
    load_rows.write_rows(tmp_path / "rows.parquet", 10_050)
    table = parquet.read_table(tmp_path / "rows.parquet")
    assert table.num_rows == len(set(table["prompt"].to_pylist())) == 10_050
    byte_level(CHATML, *IM).save_pretrained(tmp_path / "model")
    result = load_rows.measure(400, 300, str(tmp_path / "model"))
    assert (result.rows, result.drawn) == (400, 300) and result.tokens > 300 * 10 and result.micro_batches >= 2
    assert result.peak_mb >= result.base_mb > 0 and result.feed_cpu > 0
    lines = load_rows.table([result, result])
    assert len(lines) == 3 and lines[2].count(" 1.00 ") == 2
