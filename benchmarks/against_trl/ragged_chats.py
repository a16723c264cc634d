"""Make chats and pairs of very unequal length from reasoning_gym tasks; the same seed gives the same ones."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

TASKS = ("gsm_symbolic", "chain_sum", "letter_counting", "word_sorting", "lcm")
CHARACTERS_PER_TOKEN = 3.0  # of these tasks, roughly: lengths are drawn in tokens and filled in characters
MEDIAN_TOKENS, SIGMA = 110, 0.8


def write_chats(path: Path, count: int, seed: int, longest: int) -> None:
    """Write JSON lines with `messages`: one turn or many, lengths log-normal, about 30 to `longest` tokens."""
    rng, exchanges = np.random.default_rng(seed), _exchanges(seed)
    _write(path, [{"messages": _chat(tokens, exchanges)} for tokens in _lengths(rng, count, longest)])


def write_pairs(path: Path, count: int, seed: int, longest: int) -> None:
    """Write JSON lines with `prompt`, `chosen` and `rejected`; each is about half as long as a chat."""
    rng, exchanges = np.random.default_rng(seed), _exchanges(seed)
    lengths = zip(*(_lengths(rng, count, longest) for _ in range(3)), strict=True)
    rows = []
    for prompt, chosen, rejected in lengths:
        asked = "\n".join(question for question, _ in _filled(prompt / 2, exchanges))
        good, bad = (_solutions(_filled(tokens / 2, exchanges)) for tokens in (chosen, rejected))
        rows.append({"prompt": asked, "chosen": f"Yes. {good}", "rejected": f"No. {bad}"})
    _write(path, rows)


def _lengths(rng: np.random.Generator, count: int, longest: int) -> np.ndarray:
    return np.exp(rng.normal(np.log(MEDIAN_TOKENS), SIGMA, count)).clip(30, longest)


def _exchanges(seed: int) -> Iterator[tuple[str, str]]:
    """Yield questions and answers of all tasks in turn, without end."""
    import reasoning_gym

    for round_ in itertools.count():
        made = [reasoning_gym.create_dataset(task, seed=1000 * seed + round_, size=50) for task in TASKS]
        for entries in zip(*made, strict=True):
            yield from ((entry["question"], entry["answer"]) for entry in entries)


def _filled(tokens: float, exchanges: Iterator[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return enough exchanges for about this many tokens; the last one is cut short."""
    left, found = int(tokens * CHARACTERS_PER_TOKEN), []
    while left > 0:
        question, answer = next(exchanges)
        question = question[: max(20, left)]
        found.append((question, answer))
        left -= len(question) + len(answer)
    return found


def _chat(tokens: float, exchanges: Iterator[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return a chat. About half of it is the assistant's, who repeats the question before the answer."""
    messages = []
    for question, answer in _filled(tokens / 2, exchanges):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": _solutions([(question, answer)])})
    return messages


def _solutions(exchanges: list[tuple[str, str]]) -> str:
    return "\n".join(f"{question} The answer is {answer}." for question, answer in exchanges)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
