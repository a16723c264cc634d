"""Rows from any of reasoning_gym's more than 100 generators, offline, by level of difficulty.

--task chain_sum --size 1000                    the generator's own default difficulty
--task chain_sum --size 1000 --levels 2         one level of the library's curriculum for this task
--task chain_sum --size 1000 --levels 0-4       a curriculum: as many rows of each level, easy ones first
--params '{"max_digits": 2}'                    arguments of the generator; they win over the curriculum's

prompt and answer (null where any of many answers is right), reasoning_gym (the task), level, and params and entry: what
the task's own scorer reads, as text, as Python literals. JSON would lose tuples, which some scorers compare with. No
prompt of test is also in train.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from configs.blocks.source import Source
from data_feeds.reading.sources import read_source
from data_prep.recipe import TEXT, Generated, Row
from data_prep.writing import digest

COLUMNS = {
    "prompt": TEXT,
    "answer": TEXT,
    "reasoning_gym": TEXT,
    "level": pa.int64(),
    "params": TEXT,
    "entry": TEXT,
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", required=True, metavar="NAME", help="a generator of reasoning_gym")
    parser.add_argument("--params", type=_json_object, default={}, metavar="JSON", help="arguments of the generator")
    parser.add_argument("--levels", type=_levels, default=[], metavar="N[-M]", help="level or levels of its curriculum")
    parser.add_argument(
        "--range",
        choices=("inclusive", "upper_bound"),
        default="inclusive",
        help="whether a level's ranges begin at the easiest value or hold the level's own only (default: %(default)s)",
    )
    parser.add_argument("--size", type=_count, default=1000, help="rows of train.parquet (default: %(default)s)")
    parser.add_argument("--test-size", type=_count, default=0, help="rows of test.parquet (default: none)")
    parser.add_argument("--seed", type=int, default=0, help="of the rows (default: %(default)s)")


def plan(options: argparse.Namespace) -> list[Generated]:
    """Return the output's parts, test first, so that train leaves its prompts out; check names and params."""
    if not options.size:
        raise ValueError("--size must be at least 1")
    levels = options.levels or [None]
    params = [_params(options, level) for level in levels]
    for given in params:
        next(read_source(_source(options.task, given, 1), 0, "--task"))
    asked_in_test: set[bytes] = set()
    steps = []
    for split, size in (("test", options.test_size), ("train", options.size)):
        if size:
            rows = partial(_rows, options, list(zip(levels, params, strict=True)), split, size, asked_in_test)
            steps.append(Generated(split, COLUMNS, rows, f"reasoning_gym {options.task}"))
    return steps


def _rows(
    options: argparse.Namespace, levels: list[tuple[int | None, Row]], split: str, size: int, asked_in_test: set[bytes]
) -> Iterator[Row]:
    for index, (level, params) in enumerate(levels):
        wanted = size // len(levels) + (index < size % len(levels))
        seed = int(digest([options.seed, split, level]).hex()[:7], 16)
        # Twice as many are at hand, for rows whose prompt is in test.
        source = _source(options.task, params, 2 * wanted)
        for row in read_source(source, seed, "--task") if wanted else ():
            question = row.messages[0]["content"]
            identity = digest(question)
            if split == "test":
                asked_in_test.add(identity)
            elif identity in asked_in_test:
                continue
            yield {
                "prompt": question,
                "answer": row.answer,
                "reasoning_gym": options.task,
                "level": level,
                "params": _literal(params, options.task),
                "entry": _literal(row.columns["entry"], options.task),
            }
            wanted -= 1
            if not wanted:
                break
        if wanted:
            raise ValueError(
                f"--task {options.task}: at level {level} too few different questions are left beside those of test.parquet; "
                "ask for a smaller --test-size, or for harder levels"
            )


def _source(task: str, params: Row, size: int) -> Source:
    return Source(reasoning_gym=task, params=params, size=size)


def _params(options: argparse.Namespace, level: int | None) -> Row:
    """Return the generator's arguments at a level: where the curriculum's differ from the defaults, and the user's own.

    Raise ValueError when the task has no curriculum or not this level.
    """
    if level is None:
        return dict(options.params)
    from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode
    from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum

    if options.task in DATASETS and options.task not in CURRICULA:
        raise ValueError(f"--levels: reasoning_gym has no curriculum for {options.task}; set its --params instead")
    if options.task not in DATASETS:
        return dict(options.params)  # the name is refused where all names are
    curriculum = create_curriculum(options.task)
    highest = max((len(attribute.levels) for attribute in curriculum.attributes.values()), default=1) - 1
    if level > highest:
        raise ValueError(f"--levels: the curriculum of {options.task} has levels 0 to {highest}, not {level}")
    curriculum.set_global_level(level)
    context = DefaultCurriculumContext(RangeAttributeMode(options.range))
    made, usual = curriculum.generate_configuration(context=context), DATASETS[options.task][1]()
    changed: dict[str, Any] = {
        name: value
        for name, value in vars(made).items()
        if name not in ("size", "seed") and value != getattr(usual, name)
    }
    return changed | options.params


def _literal(value: Row, task: str) -> str:
    """Return text that `ast.literal_eval` reads back as equal. Raise ValueError when there is none."""
    text = repr(_plain(value))
    try:
        same = ast.literal_eval(text) == value
    except (ValueError, SyntaxError):
        same = False
    if not same:
        raise ValueError(
            f"--task {task}: its rows hold objects that cannot be written to a file; use data.sources instead"
        )
    return text


def _plain(value: Any) -> Any:
    """Return the same value with Python's own numbers and texts in place of numpy's."""
    if isinstance(value, dict):
        return {_plain(key): _plain(cell) for key, cell in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(_plain, value))
    return value.item() if isinstance(value, np.generic) else value


def _json_object(text: str) -> Row:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("it must be a JSON object")
    return value


def _levels(text: str) -> list[int]:
    first, _, last = text.partition("-")
    if not (first.isdigit() and (last.isdigit() or last == "")) or int(last or first) < int(first):
        raise argparse.ArgumentTypeError(f"'{text}' is neither a level (2) nor levels (0-4)")
    return list(range(int(first), int(last or first) + 1))


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value
