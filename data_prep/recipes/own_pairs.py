"""Preference pairs out of a model's own scored responses, which main_eval.py and main_rl.py write.

--samples evals/base/samples/eval_000001.jsonl      responses of an evaluation with several samples per prompt
--samples runs/grpo/samples/*.jsonl                 responses of a training run

Per prompt: a response of the highest reward against one of the lowest, if they differ by at least --margin; shorter
ones first, so that length teaches nothing. --per-prompt allows more pairs per prompt, each response used once.
--labels writes every response by itself instead, with a label: whether its reward reaches --margin (for KTO).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa

from data_prep.recipe import MESSAGES, TEXT, BadRow, Generated, Row

COLUMNS = {
    "prompt": MESSAGES,
    "chosen": TEXT,
    "rejected": TEXT,
    "answer": TEXT,
    "chosen_reward": pa.float64(),
    "rejected_reward": pa.float64(),
    "source": TEXT,
}

LABELS = {"prompt": MESSAGES, "response": TEXT, "label": pa.bool_(), "source": TEXT}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", nargs="+", required=True, metavar="FILE", help="samples/*.jsonl of runs")
    parser.add_argument("--margin", type=float, default=0.5, help="least difference in reward (default: %(default)s)")
    parser.add_argument("--labels", action="store_true", help="labelled responses in place of pairs")
    parser.add_argument(
        "--per-prompt", type=int, default=1, metavar="N", help="pairs per prompt (default: %(default)s)"
    )


def plan(options: argparse.Namespace) -> list[Generated]:
    missing = [file for file in options.samples if not Path(file).is_file()]
    if missing:
        raise ValueError(f"--samples: no such file: {', '.join(missing)}; main_eval.py and main_rl.py write them")
    if options.margin <= 0 or options.per_prompt < 1:
        raise ValueError("--margin must be above 0 and --per-prompt at least 1")
    if options.labels:
        return [Generated("train", LABELS, partial(labels, options.samples, options.margin), "a model's own responses")]
    rows = partial(pairs, options.samples, options.margin, options.per_prompt)
    return [Generated("train", COLUMNS, rows, "a model's own responses")]


def scored(files: list[str]) -> Iterator[Row]:
    """Yield the records of all files whose response was scored."""
    for file in files:
        with Path(file).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                record = json.loads(line)
                if not record.get("messages"):
                    raise ValueError(
                        f"{file} line {number}: it has no 'messages'; write the samples anew with this version"
                    )
                if isinstance(record["reward"], int | float):  # not those whose scoring failed
                    yield record


def labels(files: list[str], threshold: float) -> Iterator[Row]:
    """Yield every response with its label."""
    for r in scored(files):
        yield {
            "prompt": r["messages"],
            "response": r["response"],
            "label": r["reward"] >= threshold,
            "source": r["source"],
        }


def pairs(files: list[str], margin: float, per_prompt: int) -> Iterator[Row | BadRow]:
    """Yield the pairs of all prompts in the files, prompts in the order of their first record."""
    by_prompt: dict[str, list[Row]] = {}
    for record in scored(files):
        by_prompt.setdefault(json.dumps(record["messages"], sort_keys=True), []).append(record)
    for records in by_prompt.values():
        ordered = sorted(records, key=lambda r: (-r["reward"], r["tokens"]))
        worst = sorted(records, key=lambda r: (r["reward"], r["tokens"]))
        made = [
            _pair(*two) for two in zip(ordered, worst, strict=True) if two[0]["reward"] - two[1]["reward"] >= margin
        ]
        yield from made[: min(per_prompt, len(records) // 2)]
        if not made:
            yield BadRow("its responses are paid alike")


def _pair(chosen: Row, rejected: Row) -> Row:
    return {
        "prompt": chosen["messages"],
        "chosen": chosen["response"],
        "rejected": rejected["response"],
        "answer": None if chosen["answer"] is None else str(chosen["answer"]),
        "chosen_reward": float(chosen["reward"]),
        "rejected_reward": float(rejected["reward"]),
        "source": chosen["source"],
    }
