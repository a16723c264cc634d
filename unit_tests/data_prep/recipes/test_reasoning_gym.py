"""Generated rows: reproducible, scored by the task's own scorer after the round trip, by level, test apart from train."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from pyarrow import parquet

from configs.blocks.rl import Data
from configs.blocks.source import Source
from data_feeds.prompts.prompts import load_prompts
from data_prep.__main__ import main
from data_prep.tiny_sorter import make_tokenizer


def rows_of(folder: Path, name: str = "train") -> list[dict[str, Any]]:
    return parquet.read_table(folder / f"{name}.parquet").to_pylist()


def make(folder: Path, *arguments: object) -> list[dict[str, Any]]:
    assert main(["reasoning_gym", "--out", str(folder), *map(str, arguments)]) == 0
    return rows_of(folder)


@pytest.mark.parametrize(
    ("task", "levels"),
    [
        ("chain_sum", "0-2"),
        ("word_sorting", "1"),
        ("time_intervals", "1"),
        ("countdown", "0"),
        ("family_relationships", "1"),
        ("graph_color", "0"),  # any of many answers is right: there is none in the column
        ("arc_1d", "0"),
        ("knights_knaves", "1"),  # numpy's texts
        ("rearc", "1"),  # compares with tuples
        ("acre", ""),  # no curriculum
    ],
)
def test_rows_carry_what_the_tasks_own_scorer_needs(task: str, levels: str, tmp_path: Path) -> None:
    rows = make(tmp_path / "out", "--task", task, "--size", 4, *(["--levels", levels] if levels else []))
    assert len(rows) == 4
    for row in rows:
        entry = ast.literal_eval(row["entry"])
        assert (row["prompt"], row["answer"]) == (entry["question"], entry["answer"])
        scorer = reasoning_gym.create_dataset(row["reasoning_gym"], size=1, seed=0, **ast.literal_eval(row["params"]))
        if row["answer"] is not None:
            assert scorer.score_answer(row["answer"], entry) == 1.0
        assert scorer.score_answer(None, entry) < 1.0
        assert row["level"] is not None if levels else row["level"] is None


def test_levels_are_the_librarys_and_rise(tmp_path: Path) -> None:
    rows = make(tmp_path / "out", "--task", "chain_sum", "--levels", "0-3", "--size", 42, "--range", "upper_bound")
    assert [row["level"] for row in rows] == sorted(row["level"] for row in rows)
    assert [sum(row["level"] == level for row in rows) for level in range(4)] == [11, 11, 10, 10]
    for row in rows:  # the curriculum: level n has n + 2 terms of n + 1 digits
        metadata = ast.literal_eval(row["entry"])["metadata"]
        assert (metadata["num_terms"], metadata["num_digits"]) == (row["level"] + 2, row["level"] + 1)
    inclusive = make(tmp_path / "in", "--task", "chain_sum", "--levels", "3", "--size", 60)
    assert {ast.literal_eval(row["entry"])["metadata"]["num_terms"] for row in inclusive} == {2, 3, 4, 5}
    own = make(tmp_path / "own", "--task", "chain_sum", "--levels", "3", "--size", 5, "--params", '{"max_digits": 1}')
    assert {ast.literal_eval(row["entry"])["metadata"]["num_digits"] for row in own} == {1}


def test_the_same_seed_makes_the_same_rows(tmp_path: Path) -> None:
    command = ["--task", "countdown", "--size", 20, "--test-size", 5]
    one, two = make(tmp_path / "a", *command), make(tmp_path / "b", *command)
    assert one == two and rows_of(tmp_path / "a", "test") == rows_of(tmp_path / "b", "test")
    assert make(tmp_path / "c", *command, "--seed", 1) != one


def test_no_test_prompt_is_in_train(tmp_path: Path) -> None:
    small = '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}'
    train = make(tmp_path / "out", "--task", "chain_sum", "--size", 300, "--test-size", 60, "--params", small)
    test = rows_of(tmp_path / "out", "test")
    assert (len(train), len(test)) == (300, 60)
    assert {row["prompt"] for row in train}.isdisjoint(row["prompt"] for row in test)


def test_rows_come_back_as_prompts(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    make(tmp_path / "out", "--task", "chain_sum", "--size", 12, "--test-size", 6)
    sources = {
        "sources": [Source(file=str(tmp_path / "out/train.parquet"))],
        "heldout_sources": [Source(file=str(tmp_path / "out/test.parquet"))],
    }
    sets = load_prompts(Data(**sources), tokenizer)
    assert (len(sets.train), len(sets.heldout), sets.leaks) == (12, 6, 0)
    assert sets.train[0].columns["reasoning_gym"] == "chain_sum"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--task", "chain_summ"], "reasoning_gym has no task 'chain_summ'; did you mean chain_sum?"),
        (["--task", "chain_sum", "--params", '{"max_digit": 1}'], "there is no parameter 'max_digit'; did you mean"),
        (["--task", "chain_sum", "--levels", "9-11"], "the curriculum of chain_sum has levels 0 to 10, not 11"),
        (["--task", "acre", "--levels", "0"], "no curriculum for acre"),
        (["--task", "knight_swap", "--levels", "0"], "min_nodes must be >= 6"),  # this curriculum is broken
        (["--task", "chain_sum", "--size", "0"], "--size must be at least 1"),
        (
            [
                "--task",
                "coin_flip",
                "--params",
                '{"min_trials": 1, "max_trials": 1}',
                "--size",
                "5",
                "--test-size",
                "300",
            ],
            "too few different questions are left",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reasoning_gym", "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
