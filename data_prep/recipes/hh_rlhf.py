"""HH-RLHF: 160,800 pairs of replies, one preferred for being helpful or harmless.

prompt: the dialogue up to the last reply; chosen and rejected: that reply, all as chat messages. subset: its origin.
Pairs whose dialogues differ before the last reply are left out and counted.
"""

from __future__ import annotations

import argparse
import itertools
import re

from data_prep.conversations import Message, preference_pair
from data_prep.recipe import MESSAGES, BadRow, Part, Row, add_source, text_of

SUBSETS = ("harmless-base", "helpful-base", "helpful-online", "helpful-rejection-sampled")
ROLES = {"Human": "user", "Assistant": "assistant"}
_TURN = re.compile(r"\n\n(Human|Assistant):")


def arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser, "Anthropic/hh-rlhf")
    parser.add_argument(
        "--subsets", nargs="+", choices=SUBSETS, default=list(SUBSETS), help="parts of it (default: all)"
    )


def plan(options: argparse.Namespace) -> list[Part]:
    return [
        Part(
            output=split,
            repository=options.repository,
            revision=options.revision,
            files=f"{subset}/{split}.jsonl.gz",
            columns={"prompt": MESSAGES, "chosen": MESSAGES, "rejected": MESSAGES},
            convert=convert,
            needs=("chosen", "rejected"),
            constants={"subset": subset},
        )
        for split in ("train", "test")
        for subset in options.subsets
    ]


def convert(row: Row) -> Row:
    return preference_pair(*(transcript(text_of(row, column), column) for column in ("chosen", "rejected")))


def transcript(text: str, column: str) -> list[Message]:
    """Return the messages of a transcript of turns `\\n\\nHuman: ...` and `\\n\\nAssistant: ...`, with unchanged texts.

    Raise BadRow when it does not begin with a turn, when one role speaks twice in a row, or a turn says nothing.
    """
    before, *parts = _TURN.split(text)
    if before or not parts:
        raise BadRow(f"'{column}' does not begin with a turn", before[:40])
    turns = list(zip(parts[::2], parts[1::2], strict=True))
    for (speaker, _), (following, _) in itertools.pairwise(turns):
        if speaker == following:
            raise BadRow(f"'{column}': {speaker} speaks twice in a row")
    if turns[0][0] != "Human":
        raise BadRow(f"'{column}' does not begin with Human")
    messages = [{"role": ROLES[speaker], "content": said.removeprefix(" ")} for speaker, said in turns]
    if any(not message["content"].strip() for message in messages[:-1]):
        raise BadRow(f"'{column}' holds an empty turn")
    return messages
