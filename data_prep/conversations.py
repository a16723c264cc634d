"""Chat messages in source rows: check them, and split those of preference data into the prompt and the two replies."""

from __future__ import annotations

from typing import Any

from data_prep.recipe import BadRow, Row

Message = dict[str, Any]


def messages_of(row: Row, column: str, keep: tuple[str, ...] = ()) -> list[Message]:
    """Return the messages of a cell: role and content, and the fields in `keep` where a message has them.

    A message without content is kept, with empty text, when it has one of these fields (a tool call). Raise BadRow for
    anything that is no list of such messages.
    """
    cell = row.get(column)
    if not isinstance(cell, list) or not cell:
        raise BadRow(f"'{column}' holds no messages", "" if cell is None else f"a {type(cell).__name__}")
    return [_message(value, column, number, keep) for number, value in enumerate(cell, 1)]


def _message(value: Any, column: str, number: int, keep: tuple[str, ...]) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise BadRow(f"'{column}' holds a message without role", f"message {number}")
    extra = {name: value[name] for name in keep if value.get(name)}
    content = value.get("content")
    if content is None and extra:
        content = ""
    if not isinstance(content, str):
        raise BadRow(f"'{column}' holds a message without text", f"message {number}")
    return {"role": value["role"], "content": content, **extra}


def check_reply(message: Message, column: str) -> None:
    """Raise BadRow unless this is an assistant's message that says or calls something."""
    if message["role"] != "assistant":
        raise BadRow(f"'{column}' does not end with the assistant", f"it ends with {message['role']}")
    if not message["content"].strip() and len(message) == 2:
        raise BadRow(f"the reply in '{column}' is empty")


def preference_pair(chosen: list[Message], rejected: list[Message]) -> Row:
    """Return prompt, chosen and rejected, all lists of messages, from conversations that differ in their last message.

    Raise BadRow when they differ before, when the last is no reply, when the prompt is empty, or when they are equal.
    """
    for column, messages in (("chosen", chosen), ("rejected", rejected)):
        check_reply(messages[-1], column)
    if chosen[:-1] != rejected[:-1]:
        raise BadRow("chosen and rejected differ before their last message")
    if not chosen[:-1]:
        raise BadRow("nothing was asked before the reply")
    if chosen[-1] == rejected[-1]:
        raise BadRow("chosen and rejected are the same")
    return {"prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}
