"""Find the tokens of a chat that are learned: those of assistant turns with their end-of-turn tokens, and nothing else.

The template renders the whole chat once, and that text is tokenised once. Where a turn begins and ends is read from the
template's rendering, in characters, and never from token values. A turn begins where the rendering of the messages
before it, with the generation prompt, ends. It ends where the rendering up to and including it ends, without trailing
blanks. Templates with `{% generation %}` marks give both places themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from data_feeds.chat.template import check_chat_template
from data_feeds.chat.turn_spans import Messages, Turn, find_turns, without_blanks
from records.rollout import BoolArray, IntArray

_QUESTION: Messages = [{"role": "user", "content": "What is it?"}]
_TWO_TURNS: Messages = [*_QUESTION, {"role": "assistant", "content": "That."}, {"role": "user", "content": "Why?"}]
_ANSWER = "It is Grüße 你好."
_THOUGHTS = "<think>\nWell.\n</think>\n\n"  # some templates need a thinking block


@dataclass(frozen=True)
class ChatTokens:
    """The T tokens of a chat, cut after the last learned one."""

    ids: IntArray  # [T]
    is_trained: BoolArray  # [T]
    turn: IntArray  # [T] the assistant turn that a token belongs to or leads to
    text: str  # the whole rendering
    turns: tuple[Turn, ...]  # the learned turns


def first_trained(messages: Messages, train_on: str) -> int:
    """Return the index of the first message to learn under data.train_on.

    Raises:
        ValueError: the chat has no assistant turn.
    """
    assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not assistant:
        raise ValueError("the chat has no assistant turn: there is nothing to learn")
    return assistant[0] if train_on == "all_assistant" else assistant[-1]


def tokenize_chat(tokenizer: Any, messages: Messages, first: int = 0) -> ChatTokens:
    """Return the chat's tokens; assistant turns from message `first` on are marked as learned.

    A token that joins the template's opening with leading blanks of an answer (two line breaks are one token in many
    vocabularies) is not learned, because at generation the prompt ends before it.

    Raises:
        ValueError: the template refuses the messages, leaves out or changes text that should be learned, or does not
            show where a turn ends; or a token holds text both of the template and of an answer.
    """
    check_fast(tokenizer)
    text, turns = find_turns(tokenizer, messages, first)
    if not turns:
        raise ValueError("the chat has no assistant turn to learn")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the chat holds half a character (a lone surrogate), which is no text: {error}; repair the row"
        ) from error
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = np.asarray(encoded["input_ids"], dtype=np.int32)
    starts, ends = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    is_trained = np.zeros(len(ids), dtype=np.bool_)
    for turn in turns:
        is_trained |= _inside(text, turn, starts, ends)
    assistant_ends = np.asarray([turn.end for turn in turns])
    which = np.minimum(np.searchsorted(assistant_ends, starts, side="right"), len(turns) - 1)
    turn_of = np.asarray([turn.index for turn in turns], dtype=np.int32)[which]
    if not is_trained.any():
        raise ValueError("the assistant's turns have no token of their own: there is nothing to learn")
    stop = int(np.flatnonzero(is_trained)[-1]) + 1
    return ChatTokens(ids[:stop], is_trained[:stop], turn_of[:stop], text, tuple(turns))


def check_template(tokenizer: Any) -> None:
    """Check on two small chats that the learned tokens decode to the assistant's text and an end token after it.

    Raises:
        ValueError: they do not; the message says what differs. Training on such a mask would silently be wrong.
    """
    check_chat_template(tokenizer)
    for prompt in (_QUESTION, _TWO_TURNS):
        try:
            _check_mask(tokenizer, [*prompt, {"role": "assistant", "content": _ANSWER}])
        except ValueError as error:
            try:
                _check_mask(tokenizer, [*prompt, {"role": "assistant", "content": _THOUGHTS + _ANSWER}])
            except ValueError:
                raise error from None


def _check_mask(tokenizer: Any, chat: Messages) -> None:
    tokens = tokenize_chat(tokenizer, chat, first_trained(chat, "last_assistant"))
    turn = tokens.turns[-1]
    expected = tokens.text[turn.start : turn.end]
    decoded = tokenizer.decode(
        tokens.ids[tokens.is_trained], skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    knows_all_words = tokenizer.unk_token is None or tokenizer.unk_token not in decoded
    if knows_all_words and without_blanks(decoded) != without_blanks(expected):
        raise ValueError(
            f"the tokens to learn decode to {decoded!r}, not to the assistant's turn {expected!r}: the tokenizer of "
            f"'{tokenizer.name_or_path}' gives wrong character offsets; use another tokenizer.json"
        )
    if not expected.rpartition(_ANSWER)[2].strip():
        raise ValueError(
            f"the chat template of '{tokenizer.name_or_path}' puts no end-of-turn token after an assistant turn "
            f"({expected!r}): the model would never learn to stop; add one to chat_template.jinja"
        )


def check_fast(tokenizer: Any) -> None:
    """Raise ValueError when the tokenizer cannot say which characters a token stands for."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"model.path: the tokenizer of '{tokenizer.name_or_path}' gives no character offsets, from which the mask "
            "of learned tokens is made; put a tokenizer.json (a fast tokenizer) into the model folder"
        )


def _inside(text: str, turn: Turn, starts: np.ndarray, ends: np.ndarray) -> BoolArray:
    """Return which tokens belong to a turn. A token across its border may share only blanks with the template."""
    across_start = (starts < turn.start) & (ends > turn.start)
    across_end = (starts >= turn.start) & (starts < turn.end) & (ends > turn.end)
    for across, begin, stop in (
        (across_start, turn.start, int(ends[across_start].max(initial=0))),
        (across_end, turn.end, int(ends[across_end].max(initial=0))),
    ):
        if across.any() and text[begin:stop].strip():
            token = text[int(starts[across].min()) : stop]
            raise ValueError(
                f"one token, {token!r}, holds text both of the template and of assistant turn {turn.index + 1}, so it "
                "can neither be learned nor left out; change the text or the chat template"
            )
    return np.asarray((starts >= turn.start) & (starts < turn.end), dtype=np.bool_)
