"""Rows of a data source, from a file or a reasoning_gym generator, each ready to become a prompt.

Everything a user can get wrong in a data file ends in a ValueError with the file, the row and the way out.
"""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.schema import Source


@dataclass(frozen=True)
class Row:
    """One row before it is a prompt; `where` names it in messages to the user (file and 1-based row)."""

    index: int  # 0-based row in the source
    where: str
    messages: list[dict[str, Any]]
    answer: Any
    columns: dict[str, Any] = field(default_factory=dict)
    images: tuple[Any, ...] = ()


def source_name(source: Source) -> str:
    """The task's name, or the file's without its ending."""
    return source.reasoning_gym or Path(source.file or "").stem


def read_source(source: Source, seed: int, key: str) -> Iterator[Row]:
    """Rows of a source in order. `seed` is that of generated rows; files do not use it. `key` is where the source stands
    in the configuration (data.sources.0), for messages.

    Raises ValueError as the module says.
    """
    if source.reasoning_gym is not None:
        return _generated_rows(source, seed, key)
    return _file_rows(source)


def _generated_rows(source: Source, seed: int, key: str) -> Iterator[Row]:
    name, params = source.reasoning_gym or "", source.params
    dataset = _make_generator(name, params, source.size, seed, key)
    for index in range(source.size):
        try:
            entry = dataset[index]
        except Exception as error:
            raise ValueError(
                f"{key}.params: {name}: generating row {index + 1} failed: {_said(error)}; they are {params}"
            ) from error
        yield Row(
            index,
            f"{name} row {index + 1}",
            [{"role": "user", "content": entry["question"]}],
            entry["answer"],
            {"reasoning_gym": name, "params": params, "entry": entry},
        )


def _make_generator(name: str, params: dict[str, Any], size: int, seed: int, key: str) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.4)
        hint = f"the nearest are: {', '.join(near)}" if near else f"there are: {', '.join(sorted(DATASETS))}"
        raise ValueError(f"{key}.reasoning_gym: reasoning_gym has no task '{name}'; {hint}")
    takes = [p for p in inspect.signature(DATASETS[name][1]).parameters if p not in ("size", "seed")]
    for param in params:
        if param in ("size", "seed"):
            way = f"{key}.size" if param == "size" else "data.split_seed"
            raise ValueError(f"{key}.params: {name}: '{param}' is not set here but by {way}")
        if param not in takes:
            raise ValueError(f"{key}.params: {name}: there is no parameter '{param}'; {_nearest(param, takes)}")
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **params)
    except Exception as error:
        raise ValueError(f"{key}.params: {name}: bad params {params}: {_said(error)}") from error


def _file_rows(source: Source) -> Iterator[Row]:
    path = Path(source.file or "")
    if not path.is_file():
        raise ValueError(f"data file {path}: no such file{_near_file(path)}")
    lines = _parquet_rows(path, source) if path.suffix.lower() == ".parquet" else _json_rows(path, source)
    empty = True
    for index, (where, row) in enumerate(lines):
        empty = False
        columns = dict(row)
        messages = _messages(columns.pop(source.prompt_column), source.prompt_column, where)
        answer = None if source.answer_column is None else columns.pop(source.answer_column)
        images = columns.pop("images", None)
        yield Row(index, where, messages, answer, columns, tuple(images) if images is not None else ())
    if empty:
        raise ValueError(f"data file {path}: it holds no row")


def _wanted(source: Source) -> list[tuple[str, str]]:
    """Columns the file must have, with the key that names each."""
    wanted = [("prompt_column", source.prompt_column)]
    if source.answer_column is not None:
        wanted.append(("answer_column", source.answer_column))
    return wanted


def _check_columns(source: Source, where: str, names: list[str]) -> None:
    for key, column in _wanted(source):
        if column not in names:
            way = f"set data.sources[].{key}"
            if key == "answer_column":
                way += " (null: the rows have no answer)"
            raise ValueError(f"{where}: there is no column '{column}'; {_nearest(column, names)}; {way}")


def _parquet_rows(path: Path, source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"data file {path}: it is not readable as parquet: {_said(error)}") from error
    _check_columns(source, f"data file {path}", file.schema_arrow.names)
    number = 0
    for batch in file.iter_batches():
        for row in batch.to_pylist():
            number += 1
            yield f"{path} row {number}", row


def _json_rows(path: Path, source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path} line {number}"
                    row = _json_row(line, where)
                    _check_columns(source, where, list(row))
                    yield where, row
        except UnicodeDecodeError as error:
            raise ValueError(f"data file {path}: it is not UTF-8 text: {error}") from error


def _json_row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not a JSON object on one line: {error.msg} at column {error.colno}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: every line must be a JSON object of its own, this one is a {type(row).__name__}")
    return row


def _messages(cell: Any, column: str, where: str) -> list[dict[str, Any]]:
    """A prompt cell as chat messages."""
    if isinstance(cell, str) and cell.strip():
        return [{"role": "user", "content": cell}]
    if not isinstance(cell, list) or not cell:
        what = "empty" if cell is None or cell == [] or isinstance(cell, str) else f"a {type(cell).__name__}"
        raise ValueError(f"{where}: column '{column}' is {what}; it must be text or a list of chat messages")
    for message in cell:
        if not (isinstance(message, dict) and "role" in message and message.get("content") is not None):
            raise ValueError(
                f"{where}: column '{column}': every chat message needs 'role' and 'content', not {message!r}"
            )
    if cell[-1]["role"] == "assistant":
        raise ValueError(f"{where}: column '{column}' ends with the assistant's message; a prompt ends before its turn")
    # Parquet gives every message every field that any message has; empty ones were never there.
    return [{key: value for key, value in message.items() if value is not None} for message in cell]


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return f"{hint}there are: {', '.join(names) or 'none'}"


def _near_file(path: Path) -> str:
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=1, cutoff=0.6)
    return f"; did you mean {path.parent / near[0]}?" if near else f" (looked from {Path.cwd().name}/)"


def _said(error: Exception) -> str:
    return str(error).strip() or type(error).__name__
