"""Pairs and labels out of a model's own scored responses."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data_prep.__main__ import main


def record(question: str, response: str, reward: float | None, tokens: int = 3) -> dict:
    return {
        "messages": [{"role": "user", "content": question}], "response": response, "reward": reward, "tokens": tokens,
        "answer": 4, "source": "sums",
    }  # fmt: skip


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    records = [
        record("2 + 2", "four, I am sure", 1.0, 6), record("2 + 2", "4", 1.0, 1), record("2 + 2", "5", 0.0, 1),
        record("2 + 2", "it is 5", 0.1, 4), record("2 + 2", "?", None), record("1 + 1", "2", 1.0), record("1 + 1", "2.", 1.0),
    ]  # fmt: skip
    file = tmp_path / "eval_000001.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    return file


def made(out: Path) -> list[dict]:
    return pq.read_table(out / "train.parquet").to_pylist()


def test_the_best_stands_against_the_worst_shorter_ones_first(samples, tmp_path):
    assert main(["own_pairs", "--samples", str(samples), "--out", str(tmp_path / "pairs")]) == 0
    (pair,) = made(tmp_path / "pairs")  # 1 + 1: all paid alike
    assert (pair["chosen"], pair["rejected"]) == ("4", "5")
    assert (pair["chosen_reward"], pair["rejected_reward"]) == (1.0, 0.0)
    assert pair["prompt"] == [{"role": "user", "content": "2 + 2"}]
    card = json.loads((tmp_path / "pairs" / "card.json").read_text())
    assert "paid alike" in json.dumps(card)


def test_each_response_is_in_one_pair(samples, tmp_path):
    assert main(["own_pairs", "--samples", str(samples), "--per-prompt", "5", "--out", str(tmp_path / "pairs")]) == 0
    pairs = made(tmp_path / "pairs")
    assert [(p["chosen"], p["rejected"]) for p in pairs] == [("4", "5"), ("four, I am sure", "it is 5")]


def test_labels_are_every_scored_response(samples, tmp_path):
    assert main(["own_pairs", "--labels", "--samples", str(samples), "--out", str(tmp_path / "labels")]) == 0
    assert [row["label"] for row in made(tmp_path / "labels")] == [True, True, False, False, True, True]


def test_samples_that_are_not_there_are_named(tmp_path, capsys):
    assert main(["own_pairs", "--samples", str(tmp_path / "no.jsonl"), "--out", str(tmp_path / "x")]) == 2
    assert "no such file" in capsys.readouterr().err
