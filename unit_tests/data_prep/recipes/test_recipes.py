"""Each recipe on a small copy of its data set in the hub's layout, nasty rows included, and back through data_feeds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pyarrow import parquet

from configs.blocks.rl import Data
from configs.blocks.source import Source
from configs.blocks.supervised_data import SLData
from data_feeds.chat.template import load_tokenizer
from data_feeds.examples.rows import Kind
from data_feeds.examples.supervised_data import load_supervised_data
from data_feeds.prompts.prompts import load_prompts
from data_prep.__main__ import main
from data_prep.recipe import BadRow
from data_prep.recipes.hh_rlhf import transcript
from unit_tests.data_feeds.chat.chat_families import CHATML, IM, SMOLLM2, byte_level
from unit_tests.data_prep import hub_copies


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_level(CHATML, *IM)


@pytest.fixture
def made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs a recipe on a copy; returns the rows of each output, the card, and what was said."""

    def run(name: str, source: Path | None, *arguments: str, out: str = "out") -> dict[str, Any]:
        where = ["--source", str(source)] if source else []
        assert main([name, *where, "--out", str(tmp_path / out), *arguments]) == 0, capsys.readouterr().err
        folder = tmp_path / out
        found: dict[str, Any] = {p.stem: parquet.read_table(p).to_pylist() for p in folder.glob("*.parquet")}
        bad = folder / "bad_rows.jsonl"
        listed = [json.loads(line) for line in bad.read_text(encoding="utf-8").splitlines()] if bad.exists() else []
        return found | {
            "card": json.loads((folder / "card.json").read_text(encoding="utf-8")),
            "bad": {(row["file"], row["row"]): row["reason"] for row in listed},
            "said": capsys.readouterr(),
            "folder": folder,
        }

    return run


def prompts_of(path: Path, tokenizer: Any) -> list[Any]:
    sets = load_prompts(
        Data(sources=[Source(file=str(path))], heldout_fraction=0.5, split_by="row", max_prompt_tokens=4096), tokenizer
    )
    return sorted(sets.train + sets.heldout, key=lambda p: int(p.prompt_id.rpartition("/")[2]))


def learned(path: Path, tokenizer: Any, kind: Kind, **columns: str) -> list[list[str]]:
    """What a supervised job learns from each row: the texts of its responses, end tokens included."""
    data = SLData(sources=[Source(file=str(path), **columns)], heldout_fraction=0, bad_rows="error")
    feed = load_supervised_data(data, kind, tokenizer, 0)
    return [[tokenizer.decode(t.token_ids[t.is_action]) for t in example] for example in feed.all_training()]


def test_gsm8k(made: Any, tmp_path: Path, tokenizer: Any) -> None:
    found = made("gsm8k", hub_copies.gsm8k(tmp_path / "hub"))
    train = "main/train-00000-of-00001.parquet"
    assert [row["answer"] for row in found["train"]] == ["72", "1234.5", "-7", "72"]
    assert found["train"][0] == {
        "prompt": "Natalia sold 48 clips. How many in all?",
        "answer": "72",
        "solution": "48/2 = <<48/2=24>>24 clips.",
    }
    assert found["train"][2]["solution"] == "One #### in the text, then"
    assert found["bad"] == {
        (train, 4): "'question' is empty",
        (train, 5): "'question' is empty",
        (train, 6): "no 'question'",
        (train, 7): "the answer has no ####",
        (train, 8): "no number after ####",
        (train, 9): "no 'answer'",
    }
    assert f"bad row: {train} row 8: no number after #### (five)" in found["said"].err
    assert "left out: 2 rows: 'question' is empty" in found["said"].out
    card = found["card"]
    assert card["rows_read"] == 15 and sum(card["dropped"].values()) == 6
    assert {name: output["rows"] for name, output in card["outputs"].items()} == {"train": 4, "test": 5}
    assert card["outputs"]["train"]["repeated_prompts"] == 1
    assert card["outputs"]["train"]["schema"] == {"prompt": "string", "answer": "string", "solution": "string"}
    prompts = prompts_of(found["folder"] / "test.parquet", tokenizer)
    assert [(p.messages[0]["content"], p.answer) for p in prompts] == [
        (row["question"], row["answer"].split()[-1]) for row in hub_copies.GSM8K_TEST
    ]
    assert prompts[0].columns == {"solution": "Twice 1."}


@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="the model is made by `python -m data_prep.smollm2`")
def test_a_written_file_is_read_with_the_tokenizer_of_the_default_job(made: Any, tmp_path: Path) -> None:
    found = made("gsm8k", hub_copies.gsm8k(tmp_path / "hub"))
    tokenizer = load_tokenizer(str(SMOLLM2))
    prompts = prompts_of(found["folder"] / "train.parquet", tokenizer)
    assert [p.messages[0]["content"] for p in prompts] == [row["prompt"] for row in found["train"][:3]]
    solutions = learned(found["folder"] / "test.parquet", tokenizer, "demonstrations", answer_column="solution")
    assert [[text.removesuffix("<|im_end|>") for text in row] for row in solutions] == [
        [row["solution"]] for row in found["test"]
    ]


def test_deepscaler(made: Any, tmp_path: Path, tokenizer: Any) -> None:
    found = made("deepscaler", hub_copies.deepscaler(tmp_path / "hub"))
    assert [row["answer"] for row in found["train"]] == ["1", "\\frac{1}{2}", "[0, \\infty)", "42", "1"]
    assert found["train"][1] == {
        "prompt": "A fraction, written “so”.",
        "answer": "\\frac{1}{2}",
        "solution": "",
    }
    assert found["bad"] == {
        ("deepscaler.json", 5): "no answer in 'answer'",
        ("deepscaler.json", 6): "'problem' is empty",
        ("deepscaler.json", 7): "no 'problem'",
        ("deepscaler.json", 8): "not a JSON object",
    }
    assert "test" not in found
    assert len(prompts_of(found["folder"] / "train.parquet", tokenizer)) == 4  # the repeated one is left out there


def test_a_test_part_is_split_off_by_the_prompt(made: Any, tmp_path: Path) -> None:
    rows = [{"problem": f"What is {i}?", "answer": str(i)} for i in range(400)]
    source = tmp_path / "hub"
    hub_copies.write_lines(source / "deepscaler.json", rows + rows)
    found = made("deepscaler", source, "--test-fraction", "0.25")
    sides = {name: {row["prompt"] for row in found[name]} for name in ("train", "test")}
    assert sides["train"].isdisjoint(sides["test"]) and len(sides["train"] | sides["test"]) == 400
    assert 70 <= len(sides["test"]) <= 130
    assert len(found["train"]) + len(found["test"]) == 800


def test_hh_rlhf(made: Any, tmp_path: Path, tokenizer: Any) -> None:
    found = made("hh_rlhf", hub_copies.hh_rlhf(tmp_path / "hub"), "--subsets", "harmless-base", "helpful-base")
    assert len(found["train"]) == len(found["test"]) == 4
    assert [row["subset"] for row in found["train"]] == ["harmless-base"] * 2 + ["helpful-base"] * 2
    first = found["train"][0]
    assert first["prompt"] == [
        {"role": "user", "content": "Hi there"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "How do I: \n\n1. boil\n\nan egg?"},
    ]
    assert first["chosen"] == [{"role": "assistant", "content": "Eight minutes. 🥚"}]
    assert first["rejected"] == [{"role": "assistant", "content": "No."}]
    reasons = {row: reason for (file, row), reason in found["bad"].items() if file == "harmless-base/train.jsonl.gz"}
    assert reasons == {
        3: "chosen and rejected differ before their last message",
        4: "chosen and rejected are the same",
        5: "'chosen' does not end with the assistant",
        6: "the reply in 'chosen' is empty",
        7: "'chosen' does not begin with Human",
        8: "'chosen': Human speaks twice in a row",
        9: "'chosen' does not begin with a turn",
        10: "no 'rejected'",
        11: "not a JSON object",
        12: "not a JSON object",
        13: "broken text",
    }
    assert learned(found["folder"] / "train.parquet", tokenizer, "pairs")[:2] == [
        ["Eight minutes. 🥚<|im_end|>", "No.<|im_end|>"],
        ["Good<|im_end|>", "Bad<|im_end|>"],
    ]


@given(
    st.lists(
        st.text(st.characters(exclude_categories=("Cs",)), min_size=1).filter(lambda t: t.strip()),
        min_size=1,
        max_size=6,
    )
)
def test_transcripts_are_parsed_exactly(texts: list[str]) -> None:
    """Written back, the messages are the transcript. A text that holds a turn's mark itself is another transcript."""
    turns = [f"\n\n{('Human', 'Assistant')[i % 2]}: {text}" for i, text in enumerate(texts)]
    written = "".join(turns)
    assume(written.count("\n\nHuman:") + written.count("\n\nAssistant:") == len(texts))
    messages = transcript(written, "chosen")
    assert [m["content"] for m in messages] == texts
    names = {"user": "Human", "assistant": "Assistant"}
    assert "".join(f"\n\n{names[m['role']]}: {m['content']}" for m in messages) == written


def test_marks_inside_a_text_are_turns() -> None:
    with pytest.raises(BadRow, match="Assistant speaks twice"):
        transcript("\n\nHuman: a\n\nAssistant: b\n\nAssistant: c", "chosen")
    assert len(transcript("\n\nHuman: a Human: b\nAssistant: c\n\nAssistant: d", "chosen")) == 2


def test_mm_math(made: Any, tmp_path: Path, tokenizer: Any) -> None:
    found = made("mm_math", hub_copies.mm_math(tmp_path / "hub"))
    assert [(row["answer"], row["images"]) for row in found["train"]] == [
        (r"\frac{1}{\sqrt{2}}", [hub_copies.PNG]),
        ("30", [hub_copies.JPEG]),
    ]
    assert found["train"][0]["knowledge"] == {"level_1": "Shapes", "level_2": "Triangles"}
    assert found["train"][1]["difficult"] is None
    name = "MM_Math/MM_Math.jsonl"
    assert found["bad"] == {
        (name, 3): "the image is not in the zip file",
        (name, 4): "the image is no image file",
        (name, 5): "the solution boxes no answer",
        (name, 6): "no 'file_name'",
    }
    prompts = prompts_of(found["folder"] / "train.parquet", tokenizer)
    assert [p.images for p in prompts] == [(hub_copies.PNG,), (hub_copies.JPEG,)]


def test_dolci_sft(made: Any, tmp_path: Path, tokenizer: Any) -> None:
    found = made("dolci", hub_copies.dolci(tmp_path / "hub", "sft"), "--set", "sft")
    hello, tools = found["train"]
    assert (hello["id"], hello["domain"]) == ("a", "Chat")
    assert [m["content"] for m in tools["messages"]] == ["You call functions.", "Weather?", "", "sunny", "Sunny ☀"]
    assert tools["messages"][2]["function_calls"] == "f()" and tools["messages"][0]["functions"] == '[{"name": "f"}]'
    second = "data/train-00001-of-00002.parquet"
    assert found["bad"] == {
        (second, 1): "'messages' does not end with the assistant",
        (second, 2): "the reply in 'messages' is empty",
        (second, 3): "'messages' holds a message without text",
        (second, 4): "'messages' holds no messages",
        (second, 5): "'messages' holds no messages",
    }
    assert learned(found["folder"] / "train.parquet", tokenizer, "demonstrations", messages_column="messages") == [
        ["Hello<|im_end|>"],
        ["<|im_end|>Sunny ☀<|im_end|>"],
    ]


def test_dolci_dpo_and_rl(made: Any, tmp_path: Path, tokenizer: Any) -> None:
    pairs = made("dolci", hub_copies.dolci(tmp_path / "dpo", "dpo"), "--set", "dpo", out="pairs")
    assert pairs["train"] == [
        {
            "prompt": [{"role": "user", "content": "Q"}],
            "chosen": [{"role": "assistant", "content": "good"}],
            "rejected": [{"role": "assistant", "content": "bad"}],
            "chosen_model": "large",
            "prompt_id": "1",
        }
    ]
    assert learned(pairs["folder"] / "train.parquet", tokenizer, "pairs") == [["good<|im_end|>", "bad<|im_end|>"]]
    assert sorted(pairs["bad"].values()) == [
        "chosen and rejected differ before their last message",
        "nothing was asked before the reply",
    ]
    asked = made("dolci", hub_copies.dolci(tmp_path / "rl", "rl"), "--set", "rl", out="asked")
    assert [(row["prompt"], row["answer"]) for row in asked["train"]] == [
        ("What is 2+2?", "4"),
        ("Plain 问题", '["assert f()", "assert g()"]'),
    ]
    assert list(asked["train"][0]) == ["prompt", "answer", "ground_truth", "dataset"]
    assert sorted(asked["bad"].values()) == [
        "'prompt' is empty",
        "no answer in 'ground_truth'",
        "the prompt is a conversation written as text",
    ]
    assert prompts_of(asked["folder"] / "train.parquet", tokenizer)[0].columns["dataset"] == ["math"]


def test_math_eval(made: Any, tmp_path: Path, tokenizer: Any) -> None:
    found = made("math_eval", hub_copies.math_eval(tmp_path / "hub"))
    answers = {name: [row["answer"] for row in rows] for name, rows in found.items() if isinstance(rows, list)}
    assert answers == {
        "gsm8k": ["2", "4", "6", "8", "10"],
        "aime_2024": ["33"],
        "aime_2025": ["70"],
        "amc": ["142"],
        "amc_2023": ["27.5"],
        "amo_bench": [r"\{1, 2\}"],
        "brumo_2025": [r"\frac{9}{7}"],
        "hmmt_feb_2025": ["103"],
        "olympiad": ["2^{1009}", "-1, 7"],
    }
    assert found["aime_2025"][0]["benchmark"] == "aime_2025" and found["aime_2025"][0]["problem_type"] == ["Algebra"]
    assert list(found["bad"].values()) == ["no answer in 'final_answer'"]
    assert {p.source for p in prompts_of(found["folder"] / "olympiad.parquet", tokenizer)} == {"olympiad"}


def test_one_set_of_math_eval_may_come_from_another_repository(
    made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = hub_copies.math_eval(tmp_path / "hub")
    found = made("math_eval", source, "--sets", "aime_2024", "--repository", "me/aime", "--revision", "v2")
    assert found["card"]["sources"][0]["repository"] == "me/aime" and found["card"]["sources"][0]["revision"] == "v2"
    command = ["math_eval", "--source", str(source), "--out", str(tmp_path / "x"), "--repository", "me/aime"]
    assert main(command) == 2
    assert "give one name to --sets" in capsys.readouterr().err
