"""Read the prompts of a job, drop duplicates, add the system prompt, and split them so that no held-out one leaks."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from configs.blocks.rl import Data
from configs.blocks.source import Source
from data_feeds.chat.template import render_chat
from data_feeds.reading.sources import Row, read_source, source_seed, unique_names
from records.rollout import Prompt

# Signs are left out on purpose, so that 2 - 7 and 7 - 2 have the same key.
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")


@dataclass(frozen=True)
class PromptSets:
    """The prompts of a job, and how many rows were left out."""

    train: list[Prompt]
    heldout: list[Prompt]  # in random order: the first n are a fair sample of all sources
    duplicates: int  # rows with the messages of an earlier row
    too_long: int  # rows above data.max_prompt_tokens
    leaks: int  # training rows removed because heldout_sources holds them too (by data.split_by)

    def part(self, name: Literal["heldout", "train", "all"]) -> list[Prompt]:
        """Return one side of the split, or both."""
        return {"heldout": self.heldout, "train": self.train, "all": [*self.train, *self.heldout]}[name]

    def __str__(self) -> str:
        return (
            f"{len(self.train)} training and {len(self.heldout)} held-out prompts; left out: {self.duplicates} "
            f"duplicates, {self.too_long} too long, {self.leaks} also held out"
        )


def load_prompts(data: Data, tokenizer: Any) -> PromptSets:
    """Read all sources and split them. The result depends on `data` and the tokenizer alone, never on the run's seed.

    Raises:
        ValueError: a source is wrong (see data_feeds/reading/sources.py), the tokenizer has no chat template, or one
            side of the split is empty.
    """
    reader = _Reader(data, tokenizer)
    if any(source.weight != 1 for source in [*data.sources, *data.heldout_sources]):
        raise ValueError("data.sources[].weight: has no effect here, all prompts are taken together; leave it out")
    train = reader.read(data.sources, "sources")
    if not data.heldout_sources:
        train, heldout = _split(train, data)
        return PromptSets(train, _shuffled(heldout, data), reader.duplicates, reader.too_long, 0)
    heldout = _shuffled(reader.read(data.heldout_sources, "heldout_sources"), data)
    heldout_keys = {split_key(p, data.split_by) for p in heldout}
    without_leaks = [p for p in train if split_key(p, data.split_by) not in heldout_keys]
    if not without_leaks:
        raise ValueError(
            f"data.sources: all {len(train)} training prompts are also in data.heldout_sources (by data.split_by: "
            f"{data.split_by}); hold out other rows, or leave heldout_sources out and use data.heldout_fraction"
        )
    leaks = len(train) - len(without_leaks)
    return PromptSets(without_leaks, heldout, reader.duplicates, reader.too_long, leaks)


def split_key(prompt: Prompt, split_by: str) -> str:
    """Return a text such that prompts with the same one are on the same side of the split.

    For `row` it holds the messages and images; for `prompt` the question's text without case and spacing; for
    `unordered_numbers` the sorted numbers of the question, or its text where it has none.
    """
    if split_by == "row":
        return _identity(prompt.messages, prompt.images)
    text = question_text(prompt.messages)
    if split_by == "unordered_numbers":
        numbers = sorted(Decimal(n).normalize() for n in _NUMBER.findall(text))
        if numbers:
            return " ".join(str(n) for n in numbers)
    else:
        assert split_by == "prompt", split_by
    return " ".join(text.casefold().split())


def question_text(messages: Iterable[dict[str, Any]]) -> str:
    """Return all text of the messages but the system's."""
    parts: list[str] = []
    for message in messages:
        if message["role"] == "system":
            continue
        content = message["content"]
        if isinstance(content, str):
            parts.append(content)
        else:  # vision-language templates take a list of typed parts
            parts += [str(part.get("text", "")) for part in content if part.get("type") == "text"]
    return "\n".join(parts)


class _Reader:
    """Read lists of sources into prompts, and count the rows that are left out."""

    def __init__(self, data: Data, tokenizer: Any) -> None:
        self.data = data
        self.tokenizer = tokenizer
        self.duplicates = 0
        self.too_long = 0
        self._names = iter(unique_names([*data.sources, *data.heldout_sources]))

    def read(self, sources: list[Source], key: str) -> list[Prompt]:
        """Return the prompts of all sources of one list, without exact duplicates."""
        prompts: list[Prompt] = []
        seen: set[str] = set()
        shortest = None
        for index, source in enumerate(sources):
            name = next(self._names)
            seed = source_seed(self.data.split_seed, key, index)
            for row in read_source(source, seed, f"data.{key}.{index}"):
                messages = self._with_system(row)
                identity = _identity(messages, row.images)
                if identity in seen:
                    self.duplicates += 1
                    continue
                seen.add(identity)
                tokens = len(render_chat(self.tokenizer, messages))
                if tokens > self.data.max_prompt_tokens:
                    self.too_long += 1
                    shortest = min(tokens, shortest or tokens)
                    continue
                prompt_id = f"{name}/{row.index}"
                prompts.append(Prompt(prompt_id, messages, row.answer, name, row.columns, row.images))
        if not prompts:
            raise ValueError(
                f"data.{key}: every prompt is longer than data.max_prompt_tokens ({self.data.max_prompt_tokens}); "
                f"the shortest has {shortest} tokens"
            )
        return prompts

    def _with_system(self, row: Row) -> list[dict[str, Any]]:
        if self.data.system_prompt is None:
            return row.messages
        if row.messages[0]["role"] == "system":
            raise ValueError(f"{row.where}: it brings its own system message; leave data.system_prompt out")
        return [{"role": "system", "content": self.data.system_prompt}, *row.messages]


def _split(prompts: list[Prompt], data: Data) -> tuple[list[Prompt], list[Prompt]]:
    """Hold out `heldout_fraction` of the keys, rounded.

    Keys are ordered by a seeded hash, so that a row more or less moves few others to the other side.
    """
    keys = [split_key(p, data.split_by) for p in prompts]
    order = sorted(set(keys), key=lambda key: (_hash(f"{data.split_seed}\n{key}"), key))
    count = round(data.heldout_fraction * len(order))
    if count in (0, len(order)):
        side = "held-out" if count == 0 else "training"
        raise ValueError(
            f"data.heldout_fraction: {data.heldout_fraction} of {len(order)} split keys (data.split_by: "
            f"{data.split_by}) leaves the {side} set empty; give more rows, another fraction, or data.heldout_sources"
        )
    heldout_keys = set(order[:count])
    train = [p for p, key in zip(prompts, keys, strict=True) if key not in heldout_keys]
    return train, [p for p, key in zip(prompts, keys, strict=True) if key in heldout_keys]


def _shuffled(prompts: list[Prompt], data: Data) -> list[Prompt]:
    """Return the prompts in a seeded random order, so that the first n are a fair sample of all sources."""
    return sorted(prompts, key=lambda p: _hash(f"{data.split_seed}\n{p.prompt_id}"))


def _identity(messages: list[dict[str, Any]], images: tuple[Any, ...]) -> str:
    text = json.dumps(messages, sort_keys=True, ensure_ascii=False, default=repr)
    return text + "".join(_hash(image if isinstance(image, bytes) else repr(image)) for image in images)


def _hash(value: str | bytes) -> str:
    return hashlib.blake2b(value.encode() if isinstance(value, str) else value, digest_size=16).hexdigest()
