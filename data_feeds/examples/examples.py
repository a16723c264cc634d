"""From a row to what is trained on: one trajectory, or two that share their prompt. The same records as reinforcement
learning's, so that packing, the trainer and every inspection are the same code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.blocks.source import Source
from configs.blocks.supervised_data import SLData
from data_feeds.chat.loss_mask import ChatTokens, first_trained, tokenize_chat
from data_feeds.examples.rows import ExampleRow, Kind, parse_row
from data_feeds.reading.rows import Columns, Rows
from records.rollout import Prompt, Trajectory

Example = tuple[Trajectory, ...]  # one, or chosen and rejected

SHOWN_REASONS = 5  # per source and list: enough to see what is wrong
_UNKNOWN, _GOOD, _TRUNCATED, _BAD, _TOO_LONG = range(5)


class TooLongError(ValueError):
    """An example has more than data.max_tokens tokens."""


@dataclass
class LeftOut:
    """Rows of a source that are not trained on, by reason. Rows are counted once, however often they come up."""

    bad: int = 0
    too_long: int = 0
    duplicates: int = 0
    leaks: int = 0  # training rows that heldout_sources ask as well
    truncated: int = 0  # trained on, without their end
    reasons: list[str] = field(default_factory=list)  # of the first bad or too long ones

    def note(self, error: ValueError) -> None:
        if isinstance(error, TooLongError):
            self.too_long += 1
        else:
            self.bad += 1
        if len(self.reasons) < SHOWN_REASONS:
            self.reasons.append(str(error))

    def __str__(self) -> str:
        counts = {
            "bad": self.bad, "too long": self.too_long, "duplicates": self.duplicates, "also held out": self.leaks,
        }  # fmt: skip
        out = ", ".join(f"{count} {why}" for why, count in counts.items() if count)
        cut = f"; {self.truncated} truncated" if self.truncated else ""
        return f"left out: {out or 'none'}{cut}"


@dataclass(frozen=True)
class ExampleMaker:
    """Makes examples of one kind, by the data block's rules."""

    tokenizer: Any
    data: SLData
    kind: Kind

    def parse(self, row: Columns, source: Source, where: str) -> ExampleRow:
        """Raises ValueError when the row is no example of this kind."""
        return parse_row(row, source, self.kind, self.data.system_prompt, where)

    def make(self, row: ExampleRow, prompt_id: str, source: str, where: str) -> Example:
        """The row's trajectories; `prompt_id` becomes their group.

        Raises:
            TooLongError: it exceeds max_tokens, and too_long is no truncate, or truncating would leave nothing to learn.
            ValueError: the template cannot render it, or its responses tokenise alike.
        """
        try:
            chats = [self._tokens(row, response) for response in row.responses]
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        longest = max(len(chat.ids) for chat in chats)
        is_cut = longest > self.data.max_tokens
        if is_cut and self.data.too_long != "truncate":
            raise TooLongError(f"{where}: {longest} tokens, more than data.max_tokens ({self.data.max_tokens})")
        prompt_tokens = _shared_prompt(chats)
        if prompt_tokens == 0:
            raise ValueError(f"{where}: the template puts nothing before the answer to predict its first token from")
        prompt = Prompt(prompt_id, row.prompt, source=source, columns=row.columns)
        limit = self.data.max_tokens
        made = tuple(self._trajectory(chat, prompt, i, prompt_tokens, limit) for i, chat in enumerate(chats))
        if any(not t.action_tokens for t in made):
            raise TooLongError(
                f"{where}: {longest} tokens; nothing to learn is among the first {limit} (data.max_tokens)"
            )
        if len(made) == 2 and np.array_equal(made[0].token_ids, made[1].token_ids):
            cut = f" within data.max_tokens ({limit})" if is_cut else ""
            raise ValueError(f"{where}: chosen and rejected have the same tokens{cut}: there is nothing to prefer")
        for t, is_chosen in zip(made, self._preferences(row), strict=True):
            t.chosen = is_chosen
            t.response = "\n".join(_text(m) for m in row.responses[t.sample] if m["role"] == "assistant")
        return made

    def _tokens(self, row: ExampleRow, response: list[dict[str, Any]]) -> ChatTokens:
        messages = [*row.prompt, *response]
        first = len(row.prompt)
        if self.kind == "demonstrations" and self.data.train_on == "last_assistant":
            first = first_trained(messages, "last_assistant")
        return tokenize_chat(self.tokenizer, messages, first)

    def _preferences(self, row: ExampleRow) -> list[bool | None]:
        return [True, False] if self.kind == "pairs" else [row.label]

    @staticmethod
    def _trajectory(chat: ChatTokens, prompt: Prompt, sample: int, prompt_tokens: int, limit: int) -> Trajectory:
        learned = np.flatnonzero(chat.is_trained[:limit])
        stop = int(learned[-1]) + 1 if len(learned) else prompt_tokens
        tokens = slice(prompt_tokens, stop)
        count = stop - prompt_tokens
        return Trajectory(
            prompt=prompt,
            group_id=prompt.prompt_id,
            sample=sample,
            prompt_ids=chat.ids[:prompt_tokens],
            token_ids=chat.ids[tokens],
            behavior_logprobs=np.zeros(count, dtype=np.float32),
            versions=np.zeros(count, dtype=np.int32),
            is_action=chat.is_trained[tokens],
            turn=chat.turn[tokens],
            finish_reason="length" if len(chat.ids) > limit else "stop",
        )


def _shared_prompt(chats: Sequence[ChatTokens]) -> int:
    """Tokens before the first learned one that all responses share. Leading blanks of an answer may join the template's
    last token, so that two responses to one prompt differ a token early."""
    ids = [chat.ids[: int(np.flatnonzero(chat.is_trained)[0])] for chat in chats]
    shortest = min(len(i) for i in ids)
    same = np.logical_and.reduce([i[:shortest] == ids[0][:shortest] for i in ids])
    return shortest if same.all() else int(np.argmin(same))


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)


class ExampleSource:
    """The examples of one source. Its rows stay on disk and are tokenised when asked for."""

    def __init__(self, name: str, source: Source, rows: Rows, maker: ExampleMaker, kept: NDArray[np.int64]) -> None:
        self.name, self.source, self.rows, self.maker = name, source, rows, maker
        self.kept = kept  # [n] the rows that may be used, in order
        self.left_out = LeftOut()
        self._state = np.zeros(len(kept), dtype=np.uint8)
        self._found: dict[str, list[int]] = {"bad": [], "too_long": []}  # positions counted since the start

    def __len__(self) -> int:
        """Examples, those included that will turn out unusable when they are tokenised."""
        return len(self.kept)

    def get(self, position: int) -> Example | None:
        """Example `position`, or None when it is left out: bad or too long, counted the first time."""
        try:
            example = self.make(position)
        except ValueError as error:
            if self._state[position] == _UNKNOWN:
                self.left_out.note(error)
                is_long = isinstance(error, TooLongError)
                self._state[position] = _TOO_LONG if is_long else _BAD
                self._found["too_long" if is_long else "bad"].append(position)
            return None
        if self._state[position] == _UNKNOWN:
            is_cut = any(t.truncated for t in example)
            self.left_out.truncated += is_cut
            self._state[position] = _TRUNCATED if is_cut else _GOOD
        return example

    def found(self) -> dict[str, list[int]]:
        """Positions that turned out bad or too long when they were asked for, as JSON can hold it."""
        return {kind: list(positions) for kind, positions in self._found.items()}

    def load_found(self, found: dict[str, list[int]]) -> None:
        """Count what `found` told of an earlier run, as far as it is not counted here."""
        for kind, state in (("bad", _BAD), ("too_long", _TOO_LONG)):
            new = [position for position in found[kind] if self._state[position] == _UNKNOWN]
            self._state[new] = state
            self._found[kind] += new
            setattr(self.left_out, kind, getattr(self.left_out, kind) + len(new))

    def make(self, position: int) -> Example:
        """Raises ValueError or TooLongError when the example cannot be used."""
        index = int(self.kept[position])
        where = self.rows.where(index)
        row = self.maker.parse(self.rows.read(index), self.source, where)
        return self.maker.make(row, f"{self.name}/{index}", self.name, where)

    def __iter__(self) -> Iterator[Example]:
        """All usable examples in order."""
        for position in range(len(self)):
            if self._state[position] in (_BAD, _TOO_LONG):
                continue
            example = self.get(position)
            if example is not None:
                yield example
