"""GSM8K: 7,473 + 1,319 school arithmetic word problems, the answer a number.

prompt: the question. answer: the number after ####, in one spelling. solution: the worked steps before it.
"""

from __future__ import annotations

import argparse

from data_prep.answers import normal_number
from data_prep.recipe import TEXT, BadRow, Part, Row, add_source, text_of

REPOSITORY = "openai/gsm8k"
COLUMNS = {"prompt": TEXT, "answer": TEXT, "solution": TEXT}
NEEDS = ("question", "answer")


def arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser, REPOSITORY)
    parser.add_argument(
        "--config",
        choices=("main", "socratic"),
        default="main",
        help="socratic: solutions that ask themselves questions",
    )


def plan(options: argparse.Namespace) -> list[Part]:
    return [
        Part(
            output=split,
            repository=options.repository,
            revision=options.revision,
            files=f"{options.config}/{split}-*.parquet",
            columns=COLUMNS,
            convert=convert,
            needs=NEEDS,
            drops=("question",),
        )
        for split in ("train", "test")
    ]


def convert(row: Row) -> Row:
    question = text_of(row, "question")
    solution, mark, number = text_of(row, "answer").rpartition("####")
    if not mark:
        raise BadRow("the answer has no ####")
    answer = normal_number(number, thousands=True)
    if answer is None:
        raise BadRow("no number after ####", number.strip())
    return {"prompt": question, "answer": answer, "solution": solution.rstrip()}
