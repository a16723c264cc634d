"""A data source says where its rows are exactly once, and nothing that means nothing."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from configs.blocks.source import Source


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "exactly one of 'reasoning_gym', 'file' and 'dataset'"),
        ({"file": "a.jsonl", "dataset": "b"}, "exactly one of"),
        ({"file": "a.csv"}, r"'file' must end in .parquet, .jsonl, .ndjson or .json \(JSON also .gz\); given 'a.csv'"),
        ({"file": "a.parquet.gz"}, "'file' must end in"),
        (
            {"dataset": "b", "params": {"n": 1}},
            "'params' are arguments of a reasoning_gym generator; a dataset has none",
        ),
        ({"file": "a.jsonl", "split": "test"}, "'split' belongs to 'dataset'; a file has none"),
        (
            {"reasoning_gym": "chain_sum", "revision": "main"},
            "'revision' belongs to 'dataset'; a reasoning_gym has none",
        ),
        ({"file": "a.jsonl", "weight": 0.0}, "greater than 0"),
    ],
)
def test_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Source(**keys)


@pytest.mark.parametrize("file", ["a.parquet", "a.PARQUET", "a.jsonl", "a.ndjson", "a.json", "a.jsonl.gz", "a.json.gz"])
def test_files_that_are_read(file: str) -> None:
    assert Source(file=file).file == file
