"""Parse a row into a prompt and one or two responses to it.

There are three kinds of rows, by what the method learns from: demonstrations (a response to imitate), pairs (a chosen
and a rejected response) and labels (a response and whether it is desirable).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from configs.blocks.source import Source
from data_feeds.reading.rows import Columns, Rows
from data_feeds.reading.sources import chat_messages, prompt_messages
from plugins.nearest import hint

Kind = Literal["demonstrations", "pairs", "labels"]
Messages = list[dict[str, Any]]

# These column types, of parquet files and data sets, hold neither text nor messages; the second ones hold no label.
_NO_TEXT = re.compile(r"^(?:Value\(')?(?:u?int|float|double|half|bool|timestamp|date|time|decimal|null)")
_NO_LABEL = re.compile(r"^(?:Value\(')?(?:string|large_string|float|double|half|timestamp|date|time|null)")


@dataclass(frozen=True)
class ExampleRow:
    """A row that was parsed."""

    prompt: Messages  # the messages before the responses, system prompt included
    responses: tuple[Messages, ...]  # one, or chosen and rejected; each begins with the assistant's message
    label: bool | None = None  # whether a labelled response is desirable
    columns: Columns = field(default_factory=dict)  # the row's other columns


def check_columns(rows: Rows, source: Source, kind: Kind, key: str) -> None:
    """Raise ValueError when the source cannot hold this kind of rows. No row is read. `key` is data.sources.0, say."""
    if kind == "demonstrations" and source.messages_column is None and source.answer_column is None:
        raise ValueError(f"{key}.answer_column: demonstrations need an answer; name its column, or a messages_column")
    if rows.columns is None:
        return
    for name, column in _needed(source, kind):
        if column not in rows.columns:
            where = rows.where(0).rpartition(" row ")[0]
            raise ValueError(_no_column(where, column, list(rows.columns), f"{key}.{name}"))
        wrong = _NO_LABEL if name == "label_column" else _NO_TEXT
        if wrong.match(rows.columns[column]):
            holds = "true or false" if name == "label_column" else "text or lists of chat messages"
            raise ValueError(
                f"{rows.where(0).rpartition(' row ')[0]}: column '{column}' holds {rows.columns[column]}; it must hold "
                f"{holds}; set {key}.{name}"
            )


def _no_column(where: str, column: str, names: list[str], key: str) -> str:
    also = ""
    if "messages" in names and key.endswith(("prompt_column", "answer_column")):
        also = ", or messages_column: messages"
    return f"{where}: there is no column '{column}'; {hint(column, names)}; set {key}{also}"


def _needed(source: Source, kind: Kind) -> list[tuple[str, str]]:
    """Return the columns that every row must have, each after the key that names it.

    Pairs and labels need a prompt column only when their responses are not whole chats.
    """
    if kind == "pairs":
        return [("chosen_column", source.chosen_column), ("rejected_column", source.rejected_column)]
    if kind == "labels":
        return [("response_column", source.response_column), ("label_column", source.label_column)]
    if source.messages_column is not None:
        return [("messages_column", source.messages_column)]
    return [("prompt_column", source.prompt_column), ("answer_column", source.answer_column or "")]


def parse_row(row: Columns, source: Source, kind: Kind, system_prompt: str | None, where: str) -> ExampleRow:
    """Parse a row of the given kind. `where` names the row in messages.

    Raises:
        ValueError: the row is no example of this kind.
    """
    for name, column in _needed(source, kind):
        if column not in row:
            raise ValueError(_no_column(where, column, list(row), name))
    label = None
    if kind == "pairs":
        prompt, both = _pair(row, source, where)
        responses: tuple[Messages, ...] = both
    elif kind == "labels":
        prompt, response = _continued(row, source.response_column, source, where)
        responses, label = (response,), _label(row[source.label_column], source.label_column, where)
    elif source.messages_column is not None:
        prompt, response = _chat(row[source.messages_column], source.messages_column, where)
        responses = (response,)
    else:
        column = source.answer_column or ""
        prompt = prompt_messages(row[source.prompt_column], source.prompt_column, where)
        responses = (_answer(row[column], column, where),)
    if system_prompt is not None:
        if prompt and prompt[0]["role"] == "system":
            raise ValueError(f"{where}: it brings its own system message; leave data.system_prompt out")
        prompt = [{"role": "system", "content": system_prompt}, *prompt]
    used = {source.prompt_column, *(column for _, column in _needed(source, kind))}
    return ExampleRow(prompt, responses, label, {k: v for k, v in row.items() if k not in used})


def _answer(cell: Any, column: str, where: str) -> Messages:
    """Return a response that is no whole chat: text, or messages that begin with the assistant's."""
    if isinstance(cell, str):
        if not cell.strip():
            raise ValueError(f"{where}: column '{column}' is empty: there is nothing to learn")
        return [{"role": "assistant", "content": cell}]
    messages = chat_messages(cell, column, where)
    if messages[0]["role"] != "assistant":
        raise ValueError(f"{where}: column '{column}' must begin with the assistant's message, after the prompt")
    return messages


def _chat(cell: Any, column: str, where: str) -> tuple[Messages, Messages]:
    """Return a whole chat in two parts, cut before the assistant's first turn."""
    if isinstance(cell, str):
        raise ValueError(f"{where}: column '{column}' is text; it must be a list of chat messages")
    messages = chat_messages(cell, column, where)
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), None)
    if first is None:
        raise ValueError(f"{where}: column '{column}' has no assistant's message: there is nothing to learn")
    return messages[:first], messages[first:]


def _is_chat(cell: Any) -> bool:
    """Return whether a response is a whole chat, that is, messages that do not begin with the assistant's."""
    return isinstance(cell, list) and bool(cell) and isinstance(cell[0], dict) and cell[0].get("role") != "assistant"


def _continued(row: Columns, column: str, source: Source, where: str) -> tuple[Messages, Messages]:
    """Return prompt and response. The response of a whole chat is the assistant's last turn."""
    if _is_chat(row[column]):
        messages = chat_messages(row[column], column, where)
        if messages[-1]["role"] != "assistant":
            raise ValueError(f"{where}: column '{column}' must end with the assistant's message")
        return messages[:-1], messages[-1:]
    if source.prompt_column not in row:
        raise ValueError(
            f"{where}: there is no column '{source.prompt_column}' (prompt_column), which is needed because the "
            f"response is no whole chat; {hint(source.prompt_column, row)}"
        )
    prompt = prompt_messages(row[source.prompt_column], source.prompt_column, where)
    return prompt, _answer(row[column], column, where)


def _pair(row: Columns, source: Source, where: str) -> tuple[Messages, tuple[Messages, Messages]]:
    chosen, rejected = row[source.chosen_column], row[source.rejected_column]
    names = f"'{source.chosen_column}' and '{source.rejected_column}'"
    if _is_chat(chosen) != _is_chat(rejected):
        raise ValueError(f"{where}: of {names} one is a whole chat and the other is not; make both alike")
    if _is_chat(chosen):
        a = chat_messages(chosen, source.chosen_column, where)
        b = chat_messages(rejected, source.rejected_column, where)
        shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        prompt, pair = a[:shared], (a[shared:], b[shared:])
    else:
        prompt, first = _continued(row, source.chosen_column, source, where)
        pair = (first, _answer(rejected, source.rejected_column, where))
    if pair[0] == pair[1]:
        raise ValueError(f"{where}: {names} are the same: there is nothing to prefer")
    for part in pair:
        if not part or part[0]["role"] != "assistant":
            raise ValueError(f"{where}: the first messages of {names} that differ must be the assistant's")
    return prompt, pair


def _label(cell: Any, column: str, where: str) -> bool:
    if isinstance(cell, bool) or (isinstance(cell, int) and cell in (0, 1)):
        return bool(cell)
    raise ValueError(f"{where}: column '{column}' is {repr(cell)[:60]}; a label is true or false")
