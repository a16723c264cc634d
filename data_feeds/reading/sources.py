"""Read the rows of a source: a file, a data set or a reasoning_gym generator.

Every mistake in a data file ends in a ValueError that names the file and the row and says what to do.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.blocks.source import Source
from data_feeds.reading.rows import Columns, DatasetRows, JsonRows, ParquetRows, Rows, cache_folder, said
from data_feeds.reading.task_family import task_classes
from plugins.nearest import hint, nearest

# The data of configs/dpo.yaml and kto.yaml, by folder: how it is made from samples, and how those are made.
MADE_BY = {
    name: f"own_pairs --samples evals/base/samples/eval_000001.jsonl {option}"
    for name, option in (("own_pairs", "--per-prompt 4"), ("own_labels", "--labels"))
}
SAMPLED_BY = (
    "python main_eval.py --config configs/eval.yaml --set eval.samples_per_prompt=16 --set eval.split=train "
    "--run-dir evals/base"
)


@dataclass(frozen=True)
class Row:
    """One row that is ready to become a prompt."""

    index: int  # 0-based row in the source
    where: str  # its name in messages: the file and the 1-based row
    messages: list[dict[str, Any]]
    answer: Any
    columns: dict[str, Any] = field(default_factory=dict)
    images: tuple[Any, ...] = ()


def source_name(source: Source) -> str:
    """Return the name of the task or data set, or the file's name without its ending."""
    if source.file is not None:
        name = Path(source.file).name
        return name.removesuffix(".gz").rpartition(".")[0] if "." in name else name
    return source.reasoning_gym or Path(source.dataset or "").name


def open_rows(source: Source, seed: int, key: str, cache_dir: str | None = None) -> Rows:
    """Open the rows of a source.

    `seed` is used by generated rows only. `key` is the source's place in the configuration, such as data.sources.0.

    Raises:
        ValueError: there is no such source, or it holds no row.
    """
    if source.reasoning_gym is not None:
        return GeneratedRows(source, seed, key)
    if source.dataset is not None:
        rows: Rows = DatasetRows(source.dataset, source.split, source.subset, source.revision)
        what = f"data set {source.dataset}"
    else:
        path = Path(source.file or "")
        if not path.is_file():
            raise ValueError(f"data file {path}: no such file{_way_out(path)}")
        what = f"data file {path}"
        is_parquet = path.suffix.lower() == ".parquet"
        rows = ParquetRows(path, cache_folder(cache_dir)) if is_parquet else JsonRows(path)
    if not len(rows):
        raise ValueError(f"{what}: it holds no row; give {key} other data")
    return rows


def read_source(source: Source, seed: int, key: str) -> Iterator[Row]:
    """Yield the rows of a source in order, ready to become prompts of reinforcement learning.

    Raises:
        ValueError: the source cannot be opened, a row cannot be read, or it holds no prompt.
    """
    rows = open_rows(source, seed, key)
    if rows.columns is not None:
        _check_columns(source, rows.where(0).rpartition(" row ")[0], list(rows.columns))
    for index, row in enumerate(rows.all()):
        if isinstance(row, ValueError):
            raise row
        where = rows.where(index)
        if rows.columns is None:
            _check_columns(source, where, list(row))
        columns = dict(row)
        messages = prompt_messages(columns.pop(source.prompt_column), source.prompt_column, where)
        answer = None if source.answer_column is None else columns.pop(source.answer_column)
        images = columns.pop("images", None)
        if not isinstance(images, list | None):
            raise ValueError(f"{where}: column 'images' is {_short(images)}; it must be a list of images, or empty")
        yield Row(index, where, messages, answer, columns, tuple(images or ()))


class GeneratedRows:
    """Rows of a reasoning_gym generator, made when they are read. Row i depends on (seed, i) alone."""

    def __init__(self, source: Source, seed: int, key: str) -> None:
        self._source, self._key = source, key
        self.columns: dict[str, str] | None = dict.fromkeys(
            (source.prompt_column, source.answer_column or "answer", "reasoning_gym", "params", "entry"), "generated"
        )
        self._data = _make_generator(source.reasoning_gym or "", source.params, source.size, seed, key)

    def __len__(self) -> int:
        return self._source.size

    def where(self, index: int) -> str:
        return f"{self._source.reasoning_gym} row {index + 1}"

    def read(self, index: int) -> Columns:
        name, params = self._source.reasoning_gym, self._source.params
        try:
            entry = self._data[index]
        except Exception as error:
            raise ValueError(
                f"{self._key}.params: {name}: row {index + 1} could not be generated: {said(error)}; change the "
                f"params, which are {params}"
            ) from error
        return {
            self._source.prompt_column: entry["question"],
            self._source.answer_column or "answer": entry["answer"],
            "reasoning_gym": name,
            "params": params,
            "entry": entry,
        }

    def all(self) -> Iterator[Columns | ValueError]:
        for index in range(len(self)):
            yield self.read(index)  # an error here is a wrong setting and never a bad row, so it is raised


def _make_generator(name: str, params: dict[str, Any], size: int, seed: int, key: str) -> Any:
    tasks = task_classes(name)
    if name not in tasks:
        raise ValueError(f"{key}.reasoning_gym: reasoning_gym has no task '{name}'; {hint(name, sorted(tasks))}")
    takes = [p for p in inspect.signature(tasks[name][1]).parameters if p not in ("size", "seed")]
    for param in params:
        if param in ("size", "seed"):
            way = f"{key}.size" if param == "size" else "data.split_seed"
            raise ValueError(f"{key}.params: {name}: '{param}' is not set here but by {way}")
        if param not in takes:
            raise ValueError(f"{key}.params: {name}: there is no parameter '{param}'; {hint(param, takes)}")
    from reasoning_gym.factory import create_dataset

    try:
        return create_dataset(name, size=size, seed=seed, **params)
    except Exception as error:
        raise ValueError(f"{key}.params: {name}: bad params {params}: {said(error)}") from error


def _required_columns(source: Source) -> list[tuple[str, str]]:
    """Return the columns that the source must have, each after the key that names it."""
    required = [("prompt_column", source.prompt_column)]
    if source.answer_column is not None:
        required.append(("answer_column", source.answer_column))
    return required


def _check_columns(source: Source, where: str, names: list[str]) -> None:
    for key, column in _required_columns(source):
        if column not in names:
            way = f"set data.sources[].{key}"
            if key == "answer_column":
                way += " (null: the rows have no answer)"
            raise ValueError(f"{where}: there is no column '{column}'; {hint(column, names)}; {way}")


def prompt_messages(cell: Any, column: str, where: str) -> list[dict[str, Any]]:
    """Return a prompt cell as chat messages that end before the assistant's turn."""
    if isinstance(cell, str) and cell.strip():
        return [{"role": "user", "content": cell}]
    messages = chat_messages(cell, column, where)
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"{where}: column '{column}' ends with the assistant's message; a prompt ends before its turn")
    return messages


def chat_messages(cell: Any, column: str, where: str) -> list[dict[str, Any]]:
    """Return a cell as chat messages, whoever speaks last. Only a message that calls tools may lack content."""
    if not isinstance(cell, list) or not cell:
        what = "empty" if cell is None or cell == [] or isinstance(cell, str) else f"a {type(cell).__name__}"
        raise ValueError(f"{where}: column '{column}' is {what}; it must be text or a list of chat messages")
    for message in cell:
        if not (isinstance(message, dict) and "role" in message and _has_content(message)):
            raise ValueError(
                f"{where}: column '{column}': every chat message needs 'role' and 'content', not {_short(message)}"
            )
        if not isinstance(message["role"], str) or not isinstance(message.get("content"), str | list | None):
            raise ValueError(
                f"{where}: column '{column}': a role is text, content is text or a list of parts, not {_short(message)}"
            )
        parts = message.get("content")
        if isinstance(parts, list) and not all(isinstance(part, dict) for part in parts):
            raise ValueError(
                f"{where}: column '{column}': a content's parts are blocks with a 'type', not {_short(parts)}"
            )
    # Parquet gives every message every field that any message has; the empty ones were not in the data.
    return [{key: value for key, value in message.items() if value is not None} for message in cell]


def unique_names(sources: Sequence[Source]) -> list[str]:
    """Return a name for each source; the second source with the same name becomes name#2."""
    names = [source_name(source) for source in sources]
    return [n if not (k := names[:i].count(n)) else f"{n}#{k + 1}" for i, n in enumerate(names)]


def source_seed(split_seed: int, key: str, index: int) -> int:
    """Return the seed of a source's generated rows.

    reasoning_gym makes row i from seed + i, so sources with neighbouring seeds would repeat each other's rows.
    """
    return int(hashlib.blake2b(f"{split_seed} {key} {index}".encode(), digest_size=16).hexdigest()[:7], 16)


def _way_out(path: Path) -> str:
    if path.parent.name in MADE_BY:
        commands = [SAMPLED_BY, f"python -m data_prep {MADE_BY[path.parent.name]} --out {path.parent}"]
        return "\n    ".join(["; it is made from the model's own responses by", *commands])
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    guess = nearest(path.name, siblings)
    return f"; did you mean {path.parent / guess}?" if guess else f" (looked from {Path.cwd().name}/)"


def _has_content(message: dict[str, Any]) -> bool:
    return message.get("content") is not None or bool(message.get("tool_calls"))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"
