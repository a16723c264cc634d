"""A recipe says which files of which repository become which rows. The rest is the same for all recipes.

A recipe is a module in data_prep/recipes/ with a docstring (its first line is what the list shows) and two functions:
`arguments(parser)` adds its options, `plan(options)` returns its parts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

Row = dict[str, Any]

TEXT = pa.string()
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
IMAGES = pa.list_(pa.binary())


class BadRow(Exception):
    """A row that cannot be used. `reason` is one of a few, to be counted; `detail` is about this row."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else self.reason


@dataclass(frozen=True)
class Part:
    """Files of a hub repository, in its layout, and how their rows become rows of one output file."""

    output: str  # the file's name without .parquet: train, test
    repository: str
    files: str  # pattern of paths in the repository
    columns: Mapping[str, pa.DataType]  # the columns that `convert` makes; they replace source columns of the same name
    convert: Callable[..., Row]  # a source row -> the made columns; raises BadRow
    needs: tuple[str, ...]  # columns a source row must have
    drops: tuple[str, ...] = ()  # source columns not passed on; all others are
    constants: Mapping[str, str] = field(default_factory=dict)  # further columns, the same in every row
    companion: str = ""  # pattern of a zip file in the repository; `convert` gets it first, as ZippedFiles
    revision: str = "main"
    folder: str = ""  # where below --source this repository lies, when a recipe reads several


@dataclass(frozen=True)
class Generated:
    """Rows that are generated here, without any file, for one output file."""

    output: str
    columns: Mapping[str, pa.DataType]
    rows: Callable[[], Iterable[Row | BadRow]]
    origin: str  # what made them, for messages and the card


def add_source(parser: argparse.ArgumentParser, repository: str | None, revision: str = "main") -> None:
    """Add the options that say where the hub's files come from. `repository` None: the recipe names several itself."""
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--from-hub", action="store_true", help="read from the Hugging Face hub")
    place.add_argument("--source", type=Path, metavar="FOLDER", help="read from local files in the hub's layout")
    default = f"default: {repository}" if repository else "default: by what is asked for"
    parser.add_argument("--repository", default=repository, metavar="ID", help=f"hub data set ({default})")
    parser.add_argument("--revision", default=revision, help="branch, tag or commit (default: %(default)s)")


def add_test_fraction(parser: argparse.ArgumentParser) -> None:
    """Add the option for data sets that have no test split of their own."""
    parser.add_argument(
        "--test-fraction",
        type=_fraction,
        default=0.0,
        metavar="F",
        help="share of the prompts that goes to test.parquet, chosen by a hash of the prompt (default: none)",
    )


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return value


def text_of(row: Row, column: str) -> str:
    """Return a text cell; raise BadRow when it is missing, empty or no text."""
    value = row.get(column)
    if value is None:
        raise BadRow(f"no '{column}'")
    if not isinstance(value, str):
        raise BadRow(f"'{column}' is no text", f"a {type(value).__name__}")
    if not value.strip():
        raise BadRow(f"'{column}' is empty")
    return value
