"""The tiny job's data, tokenizer and model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_feeds.chat.template import render_chat
from data_prep import tiny_sorter


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_sorter.make_tokenizer()


def digits_of(text: str) -> list[int]:
    return [int(w) for w in text.split() if w.isdigit()]


def test_solutions() -> None:
    assert tiny_sorter.solve("sort", [3, 1, 4, 1]) == "1 1 3 4"
    assert tiny_sorter.solve("copy", [3, 1, 4, 1]) == "3 1 4 1"
    assert tiny_sorter.solve("reverse", [3, 1, 4, 0]) == "0 4 1 3"


def test_held_out_digits_are_in_no_training_prompt_in_any_order(tmp_path: Path) -> None:
    train, heldout = (
        [json.loads(line) for line in path.read_text().splitlines()] for path in tiny_sorter.write_data(tmp_path)
    )
    held = {tuple(sorted(digits_of(row["prompt"]))) for row in heldout}
    seen = {tuple(sorted(digits_of(row["prompt"]))) for row in train}
    taught = {tuple(sorted(digits_of(m[0]["content"]))) for m, _ in tiny_sorter.sft_examples(5000, seed=1)}
    assert held.isdisjoint(seen) and held.isdisjoint(taught)
    assert (len(train), len(heldout)) == (2000, 200)
    assert len({row["prompt"] for row in train + heldout}) == 2200
    for row in train + heldout:
        assert row["answer"] == " ".join(map(str, sorted(digits_of(row["prompt"])))) and row["prompt"].startswith(
            "sort "
        )
    assert 0.1 < len(tiny_sorter.all_digits(heldout=True)) / 10000 < 0.3


def test_data_are_the_same_each_time(tmp_path: Path) -> None:
    one, two = tiny_sorter.write_data(tmp_path / "a"), tiny_sorter.write_data(tmp_path / "b")
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in two]
    assert tiny_sorter.sft_examples(50, 3) == tiny_sorter.sft_examples(50, 3) != tiny_sorter.sft_examples(50, 4)
    with pytest.raises(ValueError, match=r"heldout.jsonl: 20000 rows asked for"):
        tiny_sorter.write_data(tmp_path / "c", heldout_rows=20000)


def test_supervised_examples_have_the_stated_mixture() -> None:
    shares: Counter[tuple[str, str]] = Counter()
    for messages, answer in tiny_sorter.sft_examples(20000, seed=0):
        task, *digits = messages[0]["content"].split()
        if len(set(digits)) == 4 and list(digits) not in (sorted(digits), sorted(digits)[::-1]):
            shares[
                (task, next(how for how in tiny_sorter.ANSWERS if tiny_sorter.ANSWERS[how](digits) == answer.split()))
            ] += 1
    total = shares.total()
    assert set(shares) == set(tiny_sorter.SFT_MIXTURE)
    for key, share in tiny_sorter.SFT_MIXTURE.items():
        assert shares[key] / total == pytest.approx(share, abs=0.02)


def test_supervised_records_train_the_answer_and_its_end(tokenizer: Any) -> None:
    for record in tiny_sorter.sft_trajectories(20, seed=0, tokenizer=tokenizer):
        assert record.prompt_ids.tolist() == render_chat(tokenizer, record.prompt.messages)
        assert tokenizer.decode(record.token_ids[:-1]) == record.prompt.answer
        assert record.token_ids[-1] == tokenizer.eos_token_id
        assert record.is_action.all() and record.action_tokens == 5


def test_the_model_folder_loads_and_is_reproducible(tmp_path: Path) -> None:
    one, two = tiny_sorter.make_untrained(tmp_path / "a"), tiny_sorter.make_untrained(tmp_path / "b")
    other = tiny_sorter.make_untrained(tmp_path / "c", seed=1)
    first, second, third = (AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in (one, two, other))
    weights = [torch.cat([p.flatten() for p in m.parameters()]) for m in (first, second, third)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert 450_000 < first.num_parameters() < 550_000
    loaded = AutoTokenizer.from_pretrained(one)
    assert len(loaded) <= first.config.vocab_size
    ids = render_chat(loaded, tiny_sorter.question("sort", [3, 1, 4, 1]))
    assert loaded.decode(ids) == "<user> sort 3 1 4 1 <assistant>"
    assert loaded.unk_token_id not in ids
    assert first.generation_config.eos_token_id == loaded.eos_token_id == loaded.convert_tokens_to_ids("<end>")
    # What the model writes decodes to the answer's text: rewards compare the two.
    written = loaded.encode("1 1 3 4", add_special_tokens=False)
    assert loaded.decode([*written, loaded.eos_token_id], skip_special_tokens=True) == "1 1 3 4"
