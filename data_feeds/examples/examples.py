"""Turn a row into an example: one trajectory, or two that share their prompt.

The records are those of reinforcement learning, so that packing, trainer and inspection are the same code.
"""

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

Example = tuple[Trajectory, ...]  # one trajectory, or chosen and rejected

MAX_REASONS = 5  # kept per source, for messages
_UNKNOWN, _GOOD, _TRUNCATED, _BAD, _TOO_LONG = range(5)


class TooLongError(ValueError):
    """The error for an example with more than data.max_tokens tokens."""


@dataclass
class LeftOut:
    """The numbers of left-out rows of a source, by reason. A row is counted once, however often it is drawn."""

    bad: int = 0
    too_long: int = 0
    duplicates: int = 0
    leaks: int = 0  # training rows that heldout_sources holds too
    truncated: int = 0  # rows that are trained on without their end
    reasons: list[str] = field(default_factory=list)  # the errors of the first bad or too long rows

    def note(self, error: ValueError) -> None:
        """Count a row that cannot be used, and keep the first reasons."""
        if isinstance(error, TooLongError):
            self.too_long += 1
        else:
            self.bad += 1
        if len(self.reasons) < MAX_REASONS:
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
    """Make examples of one kind, by the rules of the data block."""

    tokenizer: Any
    data: SLData
    kind: Kind

    def parse(self, row: Columns, source: Source, where: str) -> ExampleRow:
        """Parse the row as an example of this kind, or raise ValueError."""
        return parse_row(row, source, self.kind, self.data.system_prompt, where)

    def make(self, row: ExampleRow, prompt_id: str, source: str, where: str) -> Example:
        """Return the row's trajectories; `prompt_id` becomes their group.

        Raises:
            TooLongError: a response exceeds data.max_tokens, and data.too_long is not truncate or truncation would
                leave nothing to learn.
            ValueError: the template cannot render the row, or both responses have the same tokens.
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
            raise ValueError(
                f"{where}: the template writes nothing before the answer, so its first token has nothing to be "
                "predicted from; add a prompt"
            )
        prompt = Prompt(prompt_id, row.prompt, source=source, columns=row.columns)
        limit = self.data.max_tokens
        example = tuple(self._trajectory(chat, prompt, i, prompt_tokens, limit) for i, chat in enumerate(chats))
        if any(not t.action_tokens for t in example):
            raise TooLongError(
                f"{where}: {longest} tokens; nothing to learn is among the first {limit} (data.max_tokens)"
            )
        if len(example) == 2 and np.array_equal(example[0].token_ids, example[1].token_ids):
            cut = f" within data.max_tokens ({limit})" if is_cut else ""
            raise ValueError(f"{where}: chosen and rejected have the same tokens{cut}: there is nothing to prefer")
        for t, is_chosen in zip(example, self._preferences(row), strict=True):
            t.chosen = is_chosen
            t.response = "\n".join(_text(m) for m in row.responses[t.sample] if m["role"] == "assistant")
        return example

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
    """Return the number of tokens before the first learned one that all responses share.

    Leading blanks of an answer may join the template's last token, so that two responses differ one token early.
    """
    ids = [chat.ids[: int(np.flatnonzero(chat.is_trained)[0])] for chat in chats]
    shortest = min(len(i) for i in ids)
    same = np.logical_and.reduce([i[:shortest] == ids[0][:shortest] for i in ids])
    return shortest if same.all() else int(np.argmin(same))


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)


class ExampleSource:
    """The examples of one source. Its rows stay on disk and are tokenised when they are drawn."""

    def __init__(
        self, name: str, source: Source, rows: Rows, maker: ExampleMaker, row_numbers: NDArray[np.int64]
    ) -> None:
        self.name, self.source, self.rows, self.maker = name, source, rows, maker
        self.row_numbers = row_numbers  # [n] the rows that may be used, in order
        self.left_out = LeftOut()
        self._state = np.zeros(len(row_numbers), dtype=np.uint8)
        self._unusable: dict[str, list[int]] = {"bad": [], "too_long": []}  # positions counted since the start

    def __len__(self) -> int:
        """Return the number of examples, those included that turn out unusable when they are tokenised."""
        return len(self.row_numbers)

    def get(self, position: int) -> Example | None:
        """Return example `position`, or None when it is bad or too long, which is counted the first time."""
        try:
            example = self.make(position)
        except ValueError as error:
            if self._state[position] == _UNKNOWN:
                self.left_out.note(error)
                is_long = isinstance(error, TooLongError)
                self._state[position] = _TOO_LONG if is_long else _BAD
                self._unusable["too_long" if is_long else "bad"].append(position)
            return None
        if self._state[position] == _UNKNOWN:
            is_cut = any(t.truncated for t in example)
            self.left_out.truncated += is_cut
            self._state[position] = _TRUNCATED if is_cut else _GOOD
        return example

    def unusable(self) -> dict[str, list[int]]:
        """Return the positions that turned out bad or too long when they were drawn, in values that fit into JSON."""
        return {kind: list(positions) for kind, positions in self._unusable.items()}

    def load_unusable(self, unusable: dict[str, list[int]]) -> None:
        """Count the positions that `unusable` returned in an earlier run and that are not counted here yet."""
        for kind, state in (("bad", _BAD), ("too_long", _TOO_LONG)):
            new = [position for position in unusable[kind] if self._state[position] == _UNKNOWN]
            self._state[new] = state
            self._unusable[kind] += new
            setattr(self.left_out, kind, getattr(self.left_out, kind) + len(new))

    def make(self, position: int) -> Example:
        """Make example `position`, or raise TooLongError or ValueError when it cannot be used."""
        index = int(self.row_numbers[position])
        where = self.rows.where(index)
        row = self.maker.parse(self.rows.read(index), self.source, where)
        return self.maker.make(row, f"{self.name}/{index}", self.name, where)

    def __iter__(self) -> Iterator[Example]:
        """Yield all usable examples in order."""
        for position in range(len(self)):
            if self._state[position] in (_BAD, _TOO_LONG):
                continue
            example = self.get(position)
            if example is not None:
                yield example
