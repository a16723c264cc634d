"""DeepScaleR: 40,315 competition problems with final answers.

AIME and AMC before 2023, Omni-MATH and STILL.

prompt: the problem. answer: the final answer, numbers in one spelling. solution is passed on.
"""

from __future__ import annotations

import argparse

from data_prep.answers import final_answer
from data_prep.recipe import TEXT, Part, Row, add_source, add_test_fraction, text_of


def arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser, "agentica-org/DeepScaleR-Preview-Dataset")
    add_test_fraction(parser)


def plan(options: argparse.Namespace) -> list[Part]:
    return [
        Part(
            output="train",
            repository=options.repository,
            revision=options.revision,
            files="deepscaler.json",
            columns={"prompt": TEXT, "answer": TEXT},
            convert=convert,
            needs=("problem", "answer"),
            drops=("problem",),
        )
    ]


def convert(row: Row) -> Row:
    return {"prompt": text_of(row, "problem"), "answer": final_answer(row.get("answer"), "answer")}
