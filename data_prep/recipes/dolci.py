"""Dolci, what Olmo 3 was post-trained on: conversations (sft), preference pairs (dpo), prompts (rl).

--set sft   allenai/Dolci-Instruct-SFT   2,152,112 rows -> messages (functions and function_calls where a turn has them)
--set dpo   allenai/Dolci-Instruct-DPO     259,922 rows -> prompt, chosen, rejected
--set rl    allenai/Dolci-Instruct-RL      169,964 rows -> prompt, answer (several ground truths: a JSON list)

Sets of the same shape are read with --repository: allenai/Dolci-Think-SFT-7B, allenai/Dolci-Think-DPO-7B, ...
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from data_prep.conversations import check_reply, messages_of, preference_pair
from data_prep.recipe import MESSAGES, TEXT, BadRow, Part, Row, add_source, add_test_fraction, text_of

CALLS = ("functions", "function_calls")
TOOL_MESSAGES = pa.list_(pa.struct([(name, pa.string()) for name in ("role", "content", *CALLS)]))
_FURTHER_ROLE = re.compile(r"^(?:system|assistant): |\n(?:user|assistant): ")


def from_messages(row: Row) -> Row:
    messages = messages_of(row, "messages", keep=CALLS)
    check_reply(messages[-1], "messages")
    return {"messages": messages}


def from_pair(row: Row) -> Row:
    return preference_pair(messages_of(row, "chosen"), messages_of(row, "rejected"))


def from_prompt(row: Row) -> Row:
    """Return prompt and answer. The prompt column holds lines `role: text`; nearly all are one user turn."""
    text = text_of(row, "prompt")
    if text.startswith(("user: ", "system: ", "assistant: ")) and _FURTHER_ROLE.search(text):
        raise BadRow("the prompt is a conversation written as text")
    question = text.removeprefix("user: ")
    if not question.strip():
        raise BadRow("'prompt' is empty")
    return {"prompt": question, "answer": _answer(row.get("ground_truth"))}


def _answer(truths: Any) -> str:
    found = [truths] if isinstance(truths, str) else truths
    if not isinstance(found, list) or not any(isinstance(one, str) and one for one in found):
        raise BadRow("no answer in 'ground_truth'")
    return found[0] if len(found) == 1 else json.dumps(found, ensure_ascii=False)


@dataclass(frozen=True)
class Kind:
    repository: str
    columns: dict[str, pa.DataType]
    convert: Any
    needs: tuple[str, ...]
    drops: tuple[str, ...] = ()


SETS = {
    "sft": Kind("allenai/Dolci-Instruct-SFT", {"messages": TOOL_MESSAGES}, from_messages, ("messages",)),
    "dpo": Kind(
        "allenai/Dolci-Instruct-DPO",
        {"prompt": MESSAGES, "chosen": MESSAGES, "rejected": MESSAGES},
        from_pair,
        ("chosen", "rejected"),
    ),
    # Token ids of another tokenizer are of no use here; outputs are what another model once answered.
    "rl": Kind(
        "allenai/Dolci-Instruct-RL",
        {"prompt": TEXT, "answer": TEXT},
        from_prompt,
        ("prompt", "ground_truth"),
        ("input_ids_prompt", "outputs"),
    ),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", choices=tuple(SETS), required=True, help="what kind of data")
    add_source(parser, None)
    add_test_fraction(parser)


def plan(options: argparse.Namespace) -> list[Part]:
    kind = SETS[options.set]
    return [
        Part(
            output="train",
            repository=options.repository or kind.repository,
            revision=options.revision,
            files="data/train-*.parquet",
            columns=kind.columns,
            convert=kind.convert,
            needs=kind.needs,
            drops=kind.drops,
        )
    ]
