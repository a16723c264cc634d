"""Small copies of hub repositories, file by file as the hub has them, with good rows and nasty ones."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
JPEG = b"\xff\xd8\xff\xe0" + bytes(100)

GSM8K_TRAIN = [
    {"question": "Natalia sold 48 clips. How many in all?", "answer": "48/2 = <<48/2=24>>24 clips.\n#### 72"},
    {"question": "¿Cuántos €? 价格是多少 🧮", "answer": "It is $1,234.50.\n#### $1,234.50"},
    {"question": "Minus?", "answer": "One #### in the text, then\n#### -007"},
    {"question": "", "answer": "#### 1"},
    {"question": "  \n", "answer": "#### 1"},
    {"question": None, "answer": "#### 1"},
    {"question": "No mark", "answer": "just 5"},
    {"question": "No number", "answer": "#### five"},
    {"question": "No answer", "answer": None},
    {"question": "Natalia sold 48 clips. How many in all?", "answer": "Again.\n#### 72"},
]
GSM8K_TEST = [{"question": f"What is {i} + {i}?", "answer": f"Twice {i}.\n#### {2 * i}"} for i in range(1, 6)]

TALK = "\n\nHuman: Hi there\n\nAssistant: Hello!\n\nHuman: How do I: \n\n1. boil\n\nan egg?\n\nAssistant:"
HH_ROWS: list[Any] = [
    {"chosen": TALK + " Eight minutes. 🥚", "rejected": TALK + " No."},
    {"chosen": "\n\nHuman: Ask\n\nAssistant: Good", "rejected": "\n\nHuman: Ask\n\nAssistant: Bad"},
    {"chosen": "\n\nHuman: One\n\nAssistant: A", "rejected": "\n\nHuman: Two\n\nAssistant: B"},
    {"chosen": "\n\nHuman: Same\n\nAssistant: A", "rejected": "\n\nHuman: Same\n\nAssistant: A"},
    {"chosen": "\n\nHuman: Ends here", "rejected": "\n\nHuman: Ends here\n\nAssistant: B"},
    {"chosen": "\n\nHuman: Empty\n\nAssistant:", "rejected": "\n\nHuman: Empty\n\nAssistant: B"},
    {"chosen": "\n\nAssistant: Me first", "rejected": "\n\nAssistant: Me too"},
    {"chosen": "\n\nHuman: a\n\nHuman: b\n\nAssistant: c", "rejected": "\n\nHuman: a\n\nHuman: b\n\nAssistant: d"},
    {"chosen": "no turns at all", "rejected": "none"},
    {"chosen": "\n\nHuman: lone\n\nAssistant: half"},
    '{"chosen": "broken',
    '["a list"]',
    '{"chosen": "\\n\\nHuman: \\ud83d\\n\\nAssistant: x", "rejected": "\\n\\nHuman: \\ud83d\\n\\nAssistant: y"}',
]

DEEPSCALER = [
    {"problem": "Find $x$ with $x+1=2$.", "answer": "1", "solution": "Subtract."},
    {"problem": "A fraction, written “so”.", "answer": "\\frac{1}{2}", "solution": ""},
    {"problem": "A list, an interval", "answer": "[0, \\infty)", "solution": None},
    {"problem": "A bare number", "answer": 42, "solution": "s"},
    {"problem": "No answer", "answer": "", "solution": "s"},
    {"problem": "", "answer": "3", "solution": "s"},
    {"answer": "3", "solution": "s"},
    "not an object",
    {"problem": "Find $x$ with $x+1=2$.", "answer": "1", "solution": "Subtract."},
]

MM_MATH = [
    {
        "question": "As shown, find $AB$.",
        "file_name": "1.png",
        "solution": r"\textbf{Solution:} First $\boxed{1}$, so $AB=\boxed{\frac{1}{\sqrt{2}}}$.",
        "year": "eight",
        "difficult": "hard",
        "knowledge": {"level_1": "Shapes", "level_2": "Triangles"},
    },
    {"question": "Angle?", "file_name": "images/2.jpg", "solution": r"$\boxed{030}$", "year": "nine", "knowledge": {}},
    {"question": "Missing figure", "file_name": "9.png", "solution": r"\boxed{1}", "year": "nine"},
    {"question": "Broken figure", "file_name": "3.png", "solution": r"\boxed{1}", "year": "nine"},
    {"question": "No box", "file_name": "1.png", "solution": "It is 3.", "year": "seven"},
    {"question": "No file", "solution": r"\boxed{1}", "year": "seven"},
]


def message(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, "functions": None, "function_calls": None, **more}


DOLCI_SFT = [
    {"id": "a", "messages": [message("user", "Hi"), message("assistant", "Hello")], "domain": "Chat"},
    {
        "id": "tools",
        "messages": [
            message("system", "You call functions.", functions='[{"name": "f"}]'),
            message("user", "Weather?"),
            message("assistant", None, function_calls="f()"),
            message("environment", "sunny"),
            message("assistant", "Sunny ☀"),
        ],
        "domain": "Tools",
    },
    {"id": "b", "messages": [message("user", "And?")], "domain": "Chat"},
    {"id": "c", "messages": [message("user", "And?"), message("assistant", " ")], "domain": "Chat"},
    {"id": "d", "messages": [message("user", None), message("assistant", "x")], "domain": "Chat"},
    {"id": "e", "messages": [], "domain": "Chat"},
    {"id": "f", "messages": None, "domain": None},
]
DOLCI_DPO = [
    {
        "chosen": [{"role": "user", "content": "Q", "hashed_ip": "x"}, {"role": "assistant", "content": "good"}],
        "rejected": [{"role": "user", "content": "Q", "hashed_ip": "y"}, {"role": "assistant", "content": "bad"}],
        "chosen_model": "large",
        "prompt_id": "1",
    },
    {
        "chosen": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "good"}],
        "rejected": [{"role": "user", "content": "R"}, {"role": "assistant", "content": "bad"}],
        "chosen_model": "large",
        "prompt_id": "2",
    },
    {
        "chosen": [{"role": "assistant", "content": "good"}],
        "rejected": [{"role": "assistant", "content": "bad"}],
        "chosen_model": "large",
        "prompt_id": "3",
    },
]
DOLCI_RL = [
    {"prompt": "user: What is 2+2?", "ground_truth": ["4"], "dataset": ["math"], "input_ids_prompt": [1, 2]},
    {
        "prompt": "Plain 问题",
        "ground_truth": ["assert f()", "assert g()"],
        "dataset": ["code"],
        "input_ids_prompt": [1],
    },
    {"prompt": "system: Be kind.\nuser: Hi", "ground_truth": ["4"], "dataset": ["if"], "input_ids_prompt": [1]},
    {"prompt": "user: No truth", "ground_truth": [], "dataset": ["math"], "input_ids_prompt": [1]},
    {"prompt": "user:  ", "ground_truth": ["4"], "dataset": ["math"], "input_ids_prompt": [1]},
]

OLYMPIAD = [
    {
        "question": "How many?",
        "final_answer": ["$2^{1009}$"],
        "is_multiple_answer": False,
        "unit": None,
        "image_1": None,
    },
    {"question": "Both?", "final_answer": ["-1", "$7$"], "is_multiple_answer": True, "unit": None, "image_1": None},
    {"question": "None?", "final_answer": None, "is_multiple_answer": False, "unit": None, "image_1": None},
]


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    return path


def write_lines(path: Path, rows: list[Any]) -> Path:
    """JSON lines, gzipped when the name says so; a text is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def gsm8k(folder: Path) -> Path:
    write_parquet(folder / "main/train-00000-of-00001.parquet", GSM8K_TRAIN)
    write_parquet(folder / "main/test-00000-of-00001.parquet", GSM8K_TEST)
    return folder


def deepscaler(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "deepscaler.json").write_text(json.dumps(DEEPSCALER, indent=2, ensure_ascii=False), encoding="utf-8")
    return folder


def hh_rlhf(folder: Path) -> Path:
    for subset in ("harmless-base", "helpful-base", "helpful-online", "helpful-rejection-sampled"):
        write_lines(folder / subset / "train.jsonl.gz", HH_ROWS)
        write_lines(folder / subset / "test.jsonl.gz", HH_ROWS[:2])
    return folder


def mm_math(folder: Path) -> Path:
    write_lines(folder / "MM_Math/MM_Math.jsonl", MM_MATH)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as figures:
        figures.writestr("MM_Math/images/1.png", PNG)
        figures.writestr("images/2.jpg", JPEG)
        figures.writestr("MM_Math/images/3.png", b"<html>404</html>")
    (folder / "MM_Math/MM_Math.zip").write_bytes(content.getvalue())
    return folder


def dolci(folder: Path, kind: str) -> Path:
    rows = {"sft": DOLCI_SFT, "dpo": DOLCI_DPO, "rl": DOLCI_RL}[kind]
    write_parquet(folder / "data/train-00000-of-00002.parquet", rows[:2])
    write_parquet(folder / "data/train-00001-of-00002.parquet", rows[2:])
    return folder


def math_eval(folder: Path) -> Path:
    """One folder per set; AIME 2024 has texts, AIME 2025 integers, AMC floats, AMO-Bench boxes."""
    gsm8k(folder / "gsm8k")
    arena = {"problem": "Find $n$.", "problem_type": ["Algebra"]}
    one = "train-00000-of-00001.parquet"
    write_parquet(folder / "aime_2024/data" / one, [{"id": 60, "problem": "P?", "answer": "033", "solution": "S"}])
    write_parquet(folder / "aime_2025/data" / one, [{"problem_idx": 1, "answer": 70, **arena}])
    write_parquet(folder / "amc/data" / one, [{"id": 0, "problem": "P?", "answer": 142.0, "url": "u"}])
    write_parquet(
        folder / "amc_2023/test-00000-of-00001.parquet", [{"id": 0, "question": "P?", "answer": 27.5, "url": "u"}]
    )
    write_parquet(
        folder / "amo_bench/data/test-00000-of-00001.parquet",
        [{"question_id": 1, "prompt": "P?", "solution": "S", "answer": r"\boxed{\{1, 2\}}", "answer_type": "set"}],
    )
    write_parquet(folder / "brumo_2025/data" / one, [{"problem_idx": 1, "answer": r"$\frac{9}{7}$", **arena}])
    write_parquet(folder / "hmmt_feb_2025/data" / one, [{"problem_idx": 1, "answer": "103", **arena}])
    path = "olympiad/OlympiadBench/OE_TO_maths_en_COMP/OE_TO_maths_en_COMP.parquet"
    write_parquet(folder / path, OLYMPIAD)
    return folder
