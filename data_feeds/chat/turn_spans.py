"""Where the assistant's turns stand in a rendered chat, read off the template's own renderings, in characters."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from data_feeds.chat.template import render_text

Messages = list[dict[str, Any]]
Span = tuple[int, int]

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
MANY = 4  # turns; from there on, two renderings for each cost more than a few for all


@dataclass(frozen=True)
class Turn:
    """A learned assistant turn as a stretch of the rendered text, from what the model writes first to its end token."""

    index: int  # among all assistant turns of the chat
    start: int
    end: int


def find_turns(tokenizer: Any, messages: Messages, first: int = 0) -> tuple[str, list[Turn]]:
    """The rendered chat, and its assistant turns from message `first` on. Raises ValueError as tokenize_chat."""
    text = render_text(tokenizer, messages, add_generation_prompt=False)
    assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    number = {i: k for k, i in enumerate(assistant)}
    wanted = [i for i in assistant if i >= first]
    if _MARKS.search(tokenizer.get_chat_template()):
        found = _marked(tokenizer, messages, text, assistant)
        spans = [found[number[i]] for i in wanted]
    else:
        many = _many(tokenizer, messages, text, wanted) if len(wanted) >= MANY else None
        spans = many or [_rendered(tokenizer, messages, text, i) for i in wanted]
    turns = [Turn(number[i], *span) for i, span in zip(wanted, spans, strict=True)]
    for i, turn in zip(wanted, turns, strict=True):
        _check_kept(messages[i], text[turn.start : turn.end], turn.index)
    return text, turns


def _rendered(tokenizer: Any, messages: Messages, text: str, i: int) -> tuple[int, int]:
    """Start and end of message i, by rendering the chat up to it."""
    opening = render_text(tokenizer, messages[:i], add_generation_prompt=True) if i else ""
    if not text.startswith(opening):
        at = next((k for k, (a, b) in enumerate(zip(opening, text, strict=False)) if a != b), len(text))
        raise ValueError(
            f"the chat template of '{tokenizer.name_or_path}' asks for message {i + 1} with {_short(opening[at:])}, but "
            f"writes {_short(text[at:])} there in the finished chat (after {_short(text[max(0, at - 30) : at])}); the model "
            "would learn to go on from what it is never given"
        )
    is_last = i == len(messages) - 1
    done = text if is_last else render_text(tokenizer, messages[: i + 1], add_generation_prompt=False)
    if text.startswith(done):
        return len(opening), len(done.rstrip())
    return len(opening), _end_by_marker(tokenizer, messages, text, i)


def _end_by_marker(tokenizer: Any, messages: Messages, text: str, i: int) -> int:
    """Where message i ends when it renders differently as the last one (Qwen3 gives only that one a thinking block): a
    marker in place of its text shows what stands around it in either place."""
    marker = "marker"
    while marker in text:
        marker += "s"
    marked = {**messages[i], "content": marker}
    whole = render_text(tokenizer, [*messages[:i], marked, *messages[i + 1 :]], add_generation_prompt=False)
    last = render_text(tokenizer, [*messages[:i], marked], add_generation_prompt=False)
    before, found, after = whole.partition(marker)
    closing = last.partition(marker)[2].rstrip()
    if not (found and text.startswith(before) and text.endswith(after) and after.startswith(closing)):
        raise ValueError(
            f"the chat template of '{tokenizer.name_or_path}' ends message {i + 1} with {_short(closing)} when it is the "
            f"last one, but with {_short(after)} inside the chat; learn the last turn only (data.train_on: last_assistant)"
        )
    return len(text) - len(after) + len(closing)


def _marked(tokenizer: Any, messages: Messages, text: str, assistant: list[int]) -> list[tuple[int, int]]:
    """Start and end of every assistant turn, from the template's own marks."""
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, marks = render_jinja_template(
        conversations=[messages],
        chat_template=tokenizer.get_chat_template(),
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    assert rendered[0] == text, "the template renders differently the second time"
    if len(marks[0]) != len(assistant):
        raise ValueError(
            f"the chat template of '{tokenizer.name_or_path}' marks {len(marks[0])} generations in a chat with "
            f"{len(assistant)} assistant turns"
        )
    # Whether the end token is inside the mark is the template author's taste; it is learned either way.
    last, end = assistant[-1], marks[0][-1][1]
    is_last = last == len(messages) - 1
    done = text if is_last else render_text(tokenizer, messages[: last + 1], add_generation_prompt=False)
    closing = done[end:].rstrip() if text.startswith(done) else ""
    return [
        (
            start,
            end + len(closing) if closing and text.startswith(closing, end) else start + len(text[start:end].rstrip()),
        )
        for start, end in marks[0]
    ]


def _many(tokenizer: Any, messages: Messages, text: str, wanted: list[int]) -> list[Span] | None:
    """Spans of many turns with a handful of renderings, so that a long chat takes linear time; None: not this way.

    Markers in place of all turns at once show the template's text between them. What stands around the first turn must then
    stand around each other one; the last message, and any where something else stands, is found on its own.
    """
    contents = _contents(tokenizer, messages, text, wanted)
    if contents is None:
        return None
    first = wanted[0]
    start, end = _rendered(tokenizer, messages, text, first)
    lead, closing = text[start : contents[0][0]], text[contents[0][1] : end]
    asked = render_text(tokenizer, messages[:first], add_generation_prompt=True) if first else ""
    plain = render_text(tokenizer, messages[:first], add_generation_prompt=False) if first else ""
    if not asked.startswith(plain):
        return None
    lead_in = asked[len(plain) :] + lead
    spans = []
    for i, (begin, stop) in zip(wanted, contents, strict=True):
        is_alike = text.endswith(lead_in, 0, begin) and text.startswith(closing, stop)
        if is_alike and i != len(messages) - 1:
            spans.append((begin - len(lead), stop + len(closing)))
        else:
            spans.append(_rendered(tokenizer, messages, text, i))
    return spans


def _contents(tokenizer: Any, messages: Messages, text: str, wanted: list[int]) -> list[Span] | None:
    """Where the texts of the wanted messages stand, if the template writes them as they are or without outer blanks."""
    stem = "marker"
    while stem in text:
        stem += "s"
    markers = {i: f"{stem}{k}." for k, i in enumerate(wanted)}
    marked = [{**m, "content": markers[i]} if i in markers else m for i, m in enumerate(messages)]
    rest = render_text(tokenizer, marked, add_generation_prompt=False)
    at, spans = 0, []
    for i in wanted:
        before, found, rest = rest.partition(markers[i])
        content = messages[i].get("content") or ""
        if not found or not isinstance(content, str) or not text.startswith(before, at):
            return None
        at += len(before)
        follows = rest[: rest.find(stem)] if stem in rest else rest
        for said in (content, content.strip(), content.lstrip(), content.rstrip()):
            if text.startswith(said, at) and text.startswith(follows, at + len(said)):
                spans.append((at, at + len(said)))
                at += len(said)
                break
        else:
            return None
    return spans if text[at:] == rest else None


def _check_kept(message: dict[str, Any], rendered: str, index: int) -> None:
    """What is to be learned must stand in the rendering, give or take blanks."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if part.get("type") == "text")
    if content and squeezed(content) not in squeezed(rendered):
        raise ValueError(
            f"the chat template leaves out or changes text of assistant turn {index + 1}: {_short(content)} becomes "
            f"{_short(rendered)}; learn the last turn only (data.train_on: last_assistant), or change the text"
        )


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "…")


def squeezed(text: str) -> str:
    """Without blanks."""
    return "".join(text.split())
