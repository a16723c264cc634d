"""Find where the assistant's turns stand in a rendered chat, in characters, from the template's own renderings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from data_feeds.chat.template import render_text

Messages = list[dict[str, Any]]
Span = tuple[int, int]

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
MANY_TURNS = 4  # from this number on, two renderings per turn cost more than a few renderings for all turns


@dataclass(frozen=True)
class Turn:
    """A learned assistant turn as a span of the rendered text, from what the model writes first to its end token."""

    index: int  # its number among all assistant turns of the chat
    start: int
    end: int


def find_turns(tokenizer: Any, messages: Messages, first: int = 0) -> tuple[str, list[Turn]]:
    """Return the rendered chat, and its assistant turns from message `first` on.

    Raises:
        ValueError: the template refuses the messages, leaves out or changes text of a turn, or does not show where a
            turn begins and ends.
    """
    text = render_text(tokenizer, messages, add_generation_prompt=False)
    assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    number = {i: k for k, i in enumerate(assistant)}
    learned = [i for i in assistant if i >= first]
    if _MARKS.search(tokenizer.get_chat_template()):
        marked = _spans_from_marks(tokenizer, messages, text, assistant)
        spans = [marked[number[i]] for i in learned]
    else:
        together = _spans_together(tokenizer, messages, text, learned) if len(learned) >= MANY_TURNS else None
        spans = together or [_span_of(tokenizer, messages, text, i) for i in learned]
    turns = [Turn(number[i], *span) for i, span in zip(learned, spans, strict=True)]
    for i, turn in zip(learned, turns, strict=True):
        _check_text_stays(messages[i], text[turn.start : turn.end], turn.index)
    return text, turns


def _span_of(tokenizer: Any, messages: Messages, text: str, i: int) -> Span:
    """Return the span of message i, found by rendering the chat up to it."""
    opening = render_text(tokenizer, messages[:i], add_generation_prompt=True) if i else ""
    if not text.startswith(opening):
        at = next((k for k, (a, b) in enumerate(zip(opening, text, strict=False)) if a != b), len(text))
        raise ValueError(
            f"the chat template of '{tokenizer.name_or_path}' opens message {i + 1} with {_short(opening[at:])}, but "
            f"in the finished chat it writes {_short(text[at:])} there (after {_short(text[max(0, at - 30) : at])}); "
            "the model would learn to continue a text that it is never given. Change chat_template.jinja"
        )
    is_last = i == len(messages) - 1
    done = text if is_last else render_text(tokenizer, messages[: i + 1], add_generation_prompt=False)
    if text.startswith(done):
        return len(opening), len(done.rstrip())
    return len(opening), _end_by_marker(tokenizer, messages, text, i)


def _end_by_marker(tokenizer: Any, messages: Messages, text: str, i: int) -> int:
    """Return where message i ends when it renders differently as the last message of a chat.

    Qwen3, for one, gives only the last message a thinking block. A marker in place of the text shows what the template
    writes after it, inside the chat and at its end.
    """
    marker = "marker"
    while marker in text:
        marker += "s"
    marked = {**messages[i], "content": marker}
    whole = render_text(tokenizer, [*messages[:i], marked, *messages[i + 1 :]], add_generation_prompt=False)
    last = render_text(tokenizer, [*messages[:i], marked], add_generation_prompt=False)
    before, marker_in_whole, after = whole.partition(marker)
    closing = last.partition(marker)[2].rstrip()
    if not (marker_in_whole and text.startswith(before) and text.endswith(after) and after.startswith(closing)):
        raise ValueError(
            f"the chat template of '{tokenizer.name_or_path}' ends message {i + 1} with {_short(closing)} when it is "
            f"the last one, but with {_short(after)} inside the chat; learn the last turn only (data.train_on: "
            "last_assistant)"
        )
    return len(text) - len(after) + len(closing)


def _spans_from_marks(tokenizer: Any, messages: Messages, text: str, assistant: list[int]) -> list[Span]:
    """Return the span of every assistant turn, from the template's own marks."""
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
            f"{len(assistant)} assistant turns; put {{% generation %}} around each turn, or remove the marks"
        )
    # Some templates put the end token inside the mark, others after it; it is learned either way.
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


def _spans_together(tokenizer: Any, messages: Messages, text: str, learned: list[int]) -> list[Span] | None:
    """Return the spans of many turns from a few renderings, so that a long chat takes linear time; None if that fails.

    Markers in place of all turns at once show the template's text between them. A turn whose surroundings equal those
    of the first one has the same lead and closing. The last message, and any turn with other surroundings, is rendered
    on its own.
    """
    contents = _content_spans(tokenizer, messages, text, learned)
    if contents is None:
        return None
    first = learned[0]
    start, end = _span_of(tokenizer, messages, text, first)
    lead, closing = text[start : contents[0][0]], text[contents[0][1] : end]
    with_prompt = render_text(tokenizer, messages[:first], add_generation_prompt=True) if first else ""
    without_prompt = render_text(tokenizer, messages[:first], add_generation_prompt=False) if first else ""
    if not with_prompt.startswith(without_prompt):
        return None
    lead_in = with_prompt[len(without_prompt) :] + lead
    spans = []
    for i, (begin, stop) in zip(learned, contents, strict=True):
        is_alike = text.endswith(lead_in, 0, begin) and text.startswith(closing, stop)
        if is_alike and i != len(messages) - 1:
            spans.append((begin - len(lead), stop + len(closing)))
        else:
            spans.append(_span_of(tokenizer, messages, text, i))
    return spans


def _content_spans(tokenizer: Any, messages: Messages, text: str, learned: list[int]) -> list[Span] | None:
    """Return where the texts of the learned messages stand; None unless the template writes them as they are.

    Only leading and trailing blanks may be missing.
    """
    stem = "marker"
    while stem in text:
        stem += "s"
    markers = {i: f"{stem}{k}." for k, i in enumerate(learned)}
    marked = [{**m, "content": markers[i]} if i in markers else m for i, m in enumerate(messages)]
    rest = render_text(tokenizer, marked, add_generation_prompt=False)
    at, spans = 0, []
    for i in learned:
        before, marker, rest = rest.partition(markers[i])
        content = messages[i].get("content") or ""
        if not marker or not isinstance(content, str) or not text.startswith(before, at):
            return None
        at += len(before)
        follows = rest[: rest.find(stem)] if stem in rest else rest
        for written in (content, content.strip(), content.lstrip(), content.rstrip()):
            if text.startswith(written, at) and text.startswith(follows, at + len(written)):
                spans.append((at, at + len(written)))
                at += len(written)
                break
        else:
            return None
    return spans if text[at:] == rest else None


def _check_text_stays(message: dict[str, Any], rendered: str, index: int) -> None:
    """Raise ValueError unless the text to learn stands in the rendering, but for blanks."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if part.get("type") == "text")
    if content and without_blanks(content) not in without_blanks(rendered):
        raise ValueError(
            f"the chat template leaves out or changes text of assistant turn {index + 1}: {_short(content)} becomes "
            f"{_short(rendered)}; learn the last turn only (data.train_on: last_assistant), or change the text"
        )


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "…")


def without_blanks(text: str) -> str:
    """Return the text without any white space."""
    return "".join(text.split())
