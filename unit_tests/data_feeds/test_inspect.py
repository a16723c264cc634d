"""What `python -m data_feeds.inspect` prints, off a terminal and on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_feeds import inspect
from data_feeds.examples.examples import ExampleMaker
from unit_tests.data_feeds.chat.chat_families import CHATML, IM, byte_level


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("job")
    byte_level(CHATML, *IM).save_pretrained(made / "model")
    return made


def job(folder: Path, method: str, rows: list[Any], data: dict[str, Any] | None = None, **blocks: Any) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": {"path": str(folder / "model")},
        "algorithm": {"name": method},
        "data": {"sources": [{"file": str(folder / "rows.jsonl"), **(data or {})}], "heldout_fraction": 0.5},
        **blocks,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(config))
    return str(folder / "job.yaml")


def test_demonstrations(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(role: str, text: str) -> dict[str, str]:
        return {"role": role, "content": text}

    chat = [said("user", "why"), said("assistant", "it is"), said("user", "so"), said("assistant", "well")]
    rows = [{"messages": chat}, {"messages": [said("user", "no"), *chat[1:]]}, {"messages": "x"}]
    path = job(folder, "sft", rows, {"messages_column": "messages"})
    assert inspect.main(["--config", path, "--n", "1", "--ids", "--set", "train.batch_size=3"]) == 0
    shown = capsys.readouterr().out
    asked = "why" if "user\nwhy" in shown else "no"
    assert (
        f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n[trained]it is<|im_end|>[/trained]\n"
        "<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n[trained]well<|im_end|>[/trained]\n"
    ) in shown
    assert shown.count("'<|im_end|>'  learned, turn 1") == shown.count("'<|im_end|>'  learned, turn 2") == 1
    assert "packing of the first batch: 3 examples" in shown and "micro-batch 1: " in shown and "3 responses" in shown
    assert "1 training rows, 1 held-out examples read" in shown
    assert "1 bad" in shown and "rows.jsonl line 3: column 'messages' is text" in shown


def test_pairs_and_their_shared_prompt(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "why so", "chosen": "well", "rejected": "Paris"}]
    path = job(folder, "dpo", rows)
    assert inspect.main(["--config", path, "--set", "data.heldout_fraction=0", "--set", "train.batch_size=1"]) == 0
    shown = capsys.readouterr().out
    assert "example 1, chosen: rows/0" in shown and "[trained]well<|im_end|>[/trained]" in shown
    assert "example 1, rejected: rows/0" in shown and "[trained]Paris<|im_end|>[/trained]" in shown
    prompt = len(inspect.load_tokenizer(str(folder / "model")).apply_chat_template(
        [{"role": "user", "content": "why so"}], add_generation_prompt=True)["input_ids"])  # fmt: skip
    assert f"segments {prompt} +" in shown and f"({prompt} are shared)" in shown


def test_prompts_of_reinforcement_learning(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"what is {i}", "answer": str(i)} for i in range(4)]
    path = job(folder, "grpo", rows, reward={"parts": ["exact_match"]})
    assert inspect.main(["--config", path, "--n", "2", "--ids"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("<|im_start|>assistant\n") == 2 and shown.count("answer (the model does not see it)") == 2
    assert "2 training and 2 held-out prompts" in shown


def test_learned_tokens_are_highlighted_on_a_terminal() -> None:
    tokenizer = byte_level(CHATML, *IM)
    from configs.blocks.supervised_data import SLData

    maker = ExampleMaker(tokenizer, SLData(sources=[{"file": "a.jsonl"}]), "demonstrations")  # type: ignore[list-item]
    source = maker.data.sources[0]
    (t,) = maker.make(maker.parse({"prompt": "why", "answer": "well"}, source, "row 1"), "a/0", "a", "row 1")
    text = inspect.colored(tokenizer, t)
    assert [(text.plain[s.start : s.end], s.style) for s in text.spans] == [
        ("<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n", inspect.CONTEXT),
        ("well<|im_end|>", inspect.TRAINED),
    ]


def test_mistakes_end_in_one_message(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = job(folder, "sft", [{"prompt": "a"}])
    assert inspect.main(["--config", path]) == 2
    assert "no row can be used; the first: " in capsys.readouterr().err
    assert inspect.main(["--config", str(folder / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err
    assert inspect.main(["--config", path, "--set", "train.batch=3"]) == 2
    assert "train.batch: unknown key" in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        inspect.main(["--help"])
    shown = capsys.readouterr().out
    assert "--config configs/dpo.yaml" in shown and "learned" in shown and "--ids" in shown
