"""Both sides of the comparison get the same tokens and report the same loss; the data are ragged and repeatable."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from benchmarks.against_trl import supervised as benchmark
from benchmarks.against_trl.supervised_sides import Contest, Step, examples_of, sft_trainer
from unit_tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny")))


def contest(what: str, model: str, folder: Path) -> Contest:
    options = argparse.Namespace(examples=4, pairs=2, pack_tokens=512, pack_rows=1, dtype="bfloat16")
    return benchmark.prepared(what, model, folder, 2, options)


def test_rows_are_ragged_and_the_same_again(model: str, tmp_path: Path) -> None:
    for what in ("sft-padding", "dpo"):
        folders = tmp_path / f"{what}_a", tmp_path / f"{what}_b"
        for folder in folders:
            folder.mkdir()
        first, second = (contest(what, model, folder) for folder in folders)
        assert Path(first.rows).read_text() == Path(second.rows).read_text()
        lengths = [t.action_tokens for example in examples_of(first) for t in example]
        assert len(examples_of(first)) == 3 * first.examples
        assert max(lengths) > 2 * min(lengths)


@pytest.mark.parametrize("what", ["sft-padding", "sft-packing"])
def test_trl_is_given_our_tokens_and_our_trained_ones(what: str, model: str, tmp_path: Path) -> None:
    made = contest(what, model, tmp_path)
    trainer, note = sft_trainer(made)
    mine = [t for (t,) in examples_of(made)]
    tokens = np.concatenate(trainer.train_dataset["input_ids"])
    assert len(tokens) == sum(len(t.prompt_ids) + len(t.token_ids) for t in mine)
    trained = np.concatenate(trainer.train_dataset["labels"]) != -100
    assert trained.sum() == sum(t.action_tokens for t in mine)
    assert trainer.args.gradient_accumulation_steps >= 1
    if what == "sft-packing":  # a model that sees across examples is off by about 1
        assert float(note.rsplit(" ", 1)[1]) < 1e-4


def test_figures_count_work_over_seconds(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fast, slow = [Step(1.0, 10, 2.0), Step(1.0, 30, 1.5)], [Step(2.0, 10, 2.0), Step(2.0, 30, 1.0)]
    found = {
        "ours": benchmark.Measured([fast], 1.0, "packed"),
        "trl": benchmark.Measured([slow], 2.0, "padded"),
    }
    assert benchmark.rate(fast) == 20
    benchmark.show(contest("sft-padding", model, tmp_path), found)
    shown = capsys.readouterr().out
    assert "ratio 2.00" in shown
    assert "differs by 0.2500 in the mean, 0.5000 at most" in shown
