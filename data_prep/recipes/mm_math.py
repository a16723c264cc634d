"""MM-Math: 5,929 middle-school geometry and algebra problems, each with a figure.

prompt: the question. images: the figure's file as it is (PNG or JPEG bytes). answer: what the solution boxes last.
solution, year, difficult, knowledge and file_name are passed on.
"""

from __future__ import annotations

import argparse

from data_prep.answers import last_boxed, normal_number
from data_prep.recipe import IMAGES, TEXT, BadRow, Part, Row, add_source, add_test_fraction, text_of
from data_prep.zipped import ZippedFiles


def arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser, "THU-KEG/MM_Math")
    add_test_fraction(parser)


def plan(options: argparse.Namespace) -> list[Part]:
    return [
        Part(
            output="train",
            repository=options.repository,
            revision=options.revision,
            files="MM_Math/MM_Math.jsonl",
            companion="MM_Math/*.zip",
            columns={"prompt": TEXT, "answer": TEXT, "images": IMAGES},
            convert=convert,
            needs=("question", "solution", "file_name"),
            drops=("question",),
        )
    ]


def convert(figures: ZippedFiles, row: Row) -> Row:
    question, solution = text_of(row, "question"), text_of(row, "solution")
    boxed = last_boxed(solution)
    if not boxed:
        raise BadRow("the solution boxes no answer")
    image = figures.image(text_of(row, "file_name"))
    return {"prompt": question, "answer": normal_number(boxed) or boxed, "images": [image]}
