"""Supervised and preference jobs, whole: the real loop on one rank and on two, against plain float64 code."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from eval.report import read_metrics
from rewards.reward_model import reward_model
from unit_tests.tiny_model import write_tiny_model

JOBS = ("sft", "sft_lora", "dpo", "dpo_lora", "dpo_model_reference", "kto", "reward_model")
ROWS = [(f"{a} + {b} =", str(a + b)) for a in range(7) for b in range(5)]


def job(
    folder: Path, name: str, method: str, rows: list[dict], file: str, lora: dict | None = None, **objective
) -> None:
    data = folder / f"{file}.jsonl"  # its name is part of what the order of rows follows from
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": {"path": str(folder / "model"), "dtype": "float32", "device": "cpu"},
        "data": {
            "sources": [{"file": str(data)}], "heldout_fraction": 0.2, "split_by": "row", "max_tokens": 64,
        },
        "algorithm": {"name": method},
        "objective": {"reference_cache_dir": str(folder / "cache"), **objective},
        "train": {"batch_size": 5, "steps": 6, "learning_rate": 0.01, "max_tokens_per_micro_batch": 40},
        "eval": {"every": 3},
        "lora": lora,
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, rank_groups):
    folder = tmp_path_factory.mktemp("supervised")
    torch.manual_seed(0)
    write_tiny_model(folder / "model")
    job(folder, "sft", "sft", [{"prompt": q, "answer": a} for q, a in ROWS], "demonstrations")
    pairs = [{"prompt": q, "chosen": a, "rejected": f"{(int(a) + 3) % 20} {a}"} for q, a in ROWS]
    job(folder, "dpo", "dpo", pairs, "pairs")
    job(folder, "dpo_model_reference", "dpo", pairs, "pairs", reference="model")
    job(folder, "dpo_lora", "dpo", pairs, "pairs", lora={"rank": 4, "alpha": 16})
    job(folder, "sft_lora", "sft", [{"prompt": q, "answer": a} for q, a in ROWS], "demonstrations", lora={"rank": 4})
    job(folder, "reward_model", "reward_model", pairs, "pairs")
    labels = [
        {"prompt": q, "response": str((int(a) + i % 2) % 20), "label": i % 2 == 0} for i, (q, a) in enumerate(ROWS)
    ]
    job(folder, "kto", "kto", labels, "labels")
    for ranks in (1, 2):
        rank_groups[ranks].run("unit_tests.orchestration.ranks.supervised_rank", folder)
    return folder


def rows_of(runs: Path, ranks: int, name: str) -> list[dict]:
    return read_metrics(runs / f"runs_{ranks}" / name)


@pytest.mark.parametrize("name", JOBS)
def test_two_ranks_do_what_one_does(runs, name):
    one, two = rows_of(runs, 1, name), rows_of(runs, 2, name)
    assert [row["step"] for row in one] == list(range(7))
    for a, b in zip(one, two, strict=True):
        names = {
            n
            for n in a
            if n.startswith(("train/loss", "train/gradient_norm", "train/action", "eval/", "method/", "data/"))
        }
        assert names <= set(b) | {"eval/tokens"}
        for n in names - {"eval/tokens"}:
            assert b[n] == pytest.approx(a[n], rel=2e-4, abs=2e-5), f"step {a['step']}: {n}"


@pytest.mark.parametrize("name", JOBS)
def test_it_learns(runs, name):
    rows = rows_of(runs, 1, name)
    judged = [row["eval/loss"] for row in rows if "eval/loss" in row]
    assert len(judged) == 3, "before, after step 3 and at the end"
    assert rows[-1]["train/loss"] < rows[1]["train/loss"]
    if name.startswith("dpo"):
        assert judged[0] == pytest.approx(math.log(2), abs=1e-6), "the policy is the reference"
        assert rows[-1]["method/accuracy"] > 0.75
    if name == "reward_model":
        assert judged[0] == pytest.approx(math.log(2), abs=1e-6), "a new head gives every response the score 0"


def test_where_the_reference_is_held_makes_no_difference(runs):
    for a, b in zip(rows_of(runs, 1, "dpo"), rows_of(runs, 1, "dpo_model_reference"), strict=True):
        for name in ("train/loss", "eval/loss", "train/gradient_norm"):
            assert (name in a) == (name in b)
            assert a.get(name, 0) == pytest.approx(b.get(name, 0), rel=1e-4, abs=1e-6)


def test_the_validation_loss_is_that_of_transformers_over_whole_unpacked_chats(runs):
    """Exact on ragged data: one sum over one number of tokens, under the final weights."""
    (checkpoint,) = (runs / "runs_2" / "sft" / "checkpoints").iterdir()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    from configs.blocks.supervised import SLConfig
    from configs.reading.load import load
    from data_feeds.examples.supervised_data import load_supervised_data

    data = load(runs / "sft.yaml", SLConfig).data
    heldout = load_supervised_data(data, "demonstrations", tokenizer, seed=0).heldout
    total = tokens = 0.0
    for (t,) in heldout:
        answer = next(a for q, a in ROWS if q == t.prompt.messages[-1]["content"])
        text = tokenizer.apply_chat_template(
            [*t.prompt.messages, {"role": "assistant", "content": answer}], tokenize=False
        )
        head = tokenizer.apply_chat_template(t.prompt.messages, tokenize=False, add_generation_prompt=True)
        ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
        first = len(tokenizer(head, add_special_tokens=False).input_ids)
        logprobs = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        learned = logprobs[first - 1 : first - 1 + t.action_tokens]
        total, tokens = total - float(learned.sum()), tokens + len(learned)
    last = rows_of(runs, 2, "sft")[-1]
    assert last["eval/action_tokens"] == tokens
    assert last["eval/loss"] == pytest.approx(total / tokens, rel=1e-5)


def test_the_reward_model_loads_in_transformers_and_scores_as_it_did(runs):
    (checkpoint,) = (runs / "runs_1" / "reward_model" / "checkpoints").iterdir()
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    from configs.blocks.supervised import SLConfig
    from configs.reading.load import load
    from data_feeds.examples.supervised_data import load_supervised_data

    heldout = load_supervised_data(load(runs / "reward_model.yaml", SLConfig).data, "pairs", tokenizer, seed=0).heldout
    margins = []
    for pair in heldout:
        chosen, rejected = (
            float(model(torch.tensor(np.concatenate([t.prompt_ids, t.token_ids])[None].astype(np.int64))).logits)
            for t in pair
        )
        margins.append(chosen - rejected)
        assert reward_model(pair[0], str(checkpoint)) == pytest.approx(chosen, rel=1e-4, abs=1e-6)
        assert reward_model(pair[0], str(checkpoint), mean=1.0, scale=2.0) == pytest.approx(2 * (chosen - 1), rel=1e-4)
    last = rows_of(runs, 1, "reward_model")[-1]
    assert last["eval/method/margin"] == pytest.approx(np.mean(margins), rel=1e-4)
    assert last["eval/method/accuracy"] == pytest.approx(np.mean(np.array(margins) > 0))


def test_a_model_that_scores_nothing_is_refused_as_a_reward(runs):
    with pytest.raises(ValueError, match="not a sequence classification model of one"):
        reward_model(None, str(runs / "model"))
    with pytest.raises(ValueError, match="holds no model"):
        reward_model(None, str(runs / "nowhere"))


def test_adapters_alone_are_saved(runs):
    for name in ("sft_lora", "dpo_lora"):
        (checkpoint,) = (runs / "runs_2" / name / "checkpoints").iterdir()
        assert {"adapter_config.json", "adapter_model.safetensors"} <= {p.name for p in checkpoint.iterdir()}
        assert not (checkpoint / "model.safetensors").exists()
