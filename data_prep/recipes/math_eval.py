"""Maths evaluation sets, one file each: GSM8K, AIME, AMC, AMO-Bench, BRUMO, HMMT, OlympiadBench.

Writes FOLDER/<set>.parquet with prompt, answer and benchmark, so that metrics are told apart by the file's name. With
--source, each set's repository lies in a folder of the set's name: FOLDER/aime_2024/data/train-00000-of-00001.parquet.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from data_prep.answers import final_answer
from data_prep.recipe import TEXT, Part, Row, add_source, text_of
from data_prep.recipes import gsm8k


def convert(row: Row, question: str, answer: str) -> Row:
    return {"prompt": text_of(row, question), "answer": final_answer(row.get(answer), answer)}


@dataclass(frozen=True)
class Benchmark:
    """A set on the hub: its files, and the columns with the question and the answer."""

    repository: str
    files: str = "data/train-*.parquet"
    question: str = "problem"
    answer: str = "answer"

    @property
    def convert(self) -> Callable[[Row], Row]:
        return partial(convert, question=self.question, answer=self.answer)


SETS = {
    "gsm8k": Benchmark(gsm8k.REPOSITORY, "main/test-*.parquet", "question"),
    "aime_2024": Benchmark("HuggingFaceH4/aime_2024"),
    "aime_2025": Benchmark("MathArena/aime_2025"),
    "amc": Benchmark("AI-MO/aimo-validation-amc"),
    "amc_2023": Benchmark("math-ai/amc23", "*test-*.parquet", "question"),
    "amo_bench": Benchmark("meituan-longcat/AMO-Bench", "data/test-*.parquet", "prompt"),
    "brumo_2025": Benchmark("MathArena/brumo_2025"),
    "hmmt_feb_2025": Benchmark("MathArena/hmmt_feb_2025"),
    "olympiad": Benchmark(
        "Hothan/OlympiadBench",
        "OlympiadBench/OE_TO_maths_en_COMP/OE_TO_maths_en_COMP.parquet",
        "question",
        "final_answer",
    ),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sets", nargs="+", choices=tuple(SETS), default=list(SETS), help="which (default: all of them)"
    )
    add_source(parser, None)


def plan(options: argparse.Namespace) -> list[Part]:
    if len(options.sets) > 1 and (options.repository or options.revision != "main"):
        raise ValueError("--repository and --revision are those of one set; give one name to --sets")
    return [_part(name, SETS[name], options) for name in dict.fromkeys(options.sets)]


def _part(name: str, benchmark: Benchmark, options: argparse.Namespace) -> Part:
    made = gsm8k.COLUMNS if name == "gsm8k" else {"prompt": TEXT, "answer": TEXT}
    return Part(
        output=name,
        folder=name,
        repository=options.repository or benchmark.repository,
        revision=options.revision,
        files=benchmark.files,
        columns=made,
        convert=gsm8k.convert if name == "gsm8k" else benchmark.convert,
        needs=(benchmark.question, benchmark.answer),
        drops=(benchmark.question, benchmark.answer),
        constants={"benchmark": name},
    )
