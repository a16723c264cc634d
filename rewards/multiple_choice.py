"""Reward responses that choose the right one of several lettered options."""

from __future__ import annotations

import re
from typing import Any

from plugins.marks import checked_by
from records.rollout import Trajectory

OPTIONS_AT_MOST = 26
# Before these words a single A is a choice; before other words it is an article.
AFTER_A = "because|since|as|and|or|is|which"

JOINER = r"[*)}\s]*(?:or|and|/|,|&)[*(\s]*"


def _letters_are_letters(letters: str, options_column: str | None) -> None:
    if not re.fullmatch("[A-Z]{2,26}", letters) or len(set(letters)) != len(letters):
        raise ValueError(f"params.letters: {letters!r} must be at least two different letters from A to Z")


@checked_by(_letters_are_letters)
def multiple_choice(trajectory: Trajectory, letters: str = "ABCDE", options_column: str | None = "choices") -> float:
    """Return 1 when the response chooses the option that the answer names, else 0.

    The answer is a letter, or an option's text when the row has a list of options in `options_column` (their letters
    are A, B, ... in order). The choice is looked for in this order: a boxed letter or `answer is C`; a letter in
    brackets `(C)`; a last line that begins with a letter (`C.`, `C)`) or is one; in the last line a single capital
    letter, or the text of exactly one option. The last one of a kind counts; two of them joined (`A or B`) are no
    choice.

    Raises:
        ValueError: the answer is neither a letter nor an option.
    """
    prompt = trajectory.prompt
    options = _options(prompt.columns.get(options_column) if options_column else None, prompt.prompt_id)
    if options:
        letters = "".join(chr(ord("A") + i) for i in range(len(options)))
    answer = "" if prompt.answer is None else _plain(str(prompt.answer))
    expected = letters[options.index(answer)] if answer in options else answer.strip("().:").upper()
    if len(expected) != 1 or expected not in letters:
        raise ValueError(
            f"the answer of prompt {prompt.prompt_id} is {str(prompt.answer)[:80]!r}, which is none of the letters "
            + (
                f"{letters} and none of the options {options}; correct the row"
                if options
                else f"{letters}; set params.options_column to the column that holds the options"
            )
        )
    return float(find_choice(trajectory.response, letters, options) == expected)


def find_choice(response: str, letters: str, options: list[str]) -> str | None:
    """Return the letter that a response chooses, or None. `options` are plain texts in the letters' order, or empty."""
    one = f"[{letters}{letters.lower()}]"
    own = f"(?:[{letters.replace('A', '')}]|A(?! (?!{AFTER_A})[a-z]))" if "A" in letters else f"[{letters}]"
    lines = [line.strip() for line in response.splitlines() if line.strip()]
    last = lines[-1].strip("*_ ") if lines else ""
    # Possessive (*+, ?+): white space that is read once is not read again in another way, which could take for ever.
    letter = rf"\(\s*({one})\s*\)|({own})(?![A-Za-z0-9'])|({one})[^\S\n]*+[.)]?+[^\S\n]*+$"
    answer_is = rf"(?i:answer|choice|option)\s*+(?i:is)?+\s*+:?+[\s*_$]*+(?:{letter})"
    for pattern, text in (
        (rf"\\boxed\{{\s*(?:\\text\{{\s*)?\(?({one})\)?\s*\}}|{answer_is}", response),
        (rf"\(\s*({one})\s*\)", response),
        (rf"^\(?({one})\s*(?:[.):]|$)", last),
        (rf"(?<![A-Za-z0-9'])({own})(?![A-Za-z0-9'])", last),
    ):
        matches = list(re.finditer(pattern, text, re.MULTILINE))
        if matches:
            before, behind = text[: matches[-1].start()], text[matches[-1].end() :]
            joined = re.match(rf"{JOINER}{one}(?![A-Za-z0-9'])", behind) or re.search(
                rf"(?<![A-Za-z0-9']){one}{JOINER}$", before
            )
            return None if joined else next(g for g in matches[-1].groups() if g).upper()
    mentioned = [i for i, option in enumerate(options) if option and _holds(_plain(last), option)]
    # "red wine" also holds "red", so an option inside another one that is mentioned does not count.
    mentioned = [i for i in mentioned if not any(i != j and _holds(options[j], options[i]) for j in mentioned)]
    return letters[mentioned[0]] if len(mentioned) == 1 else None


def _options(column: Any, prompt_id: str) -> list[str]:
    if column is None:
        return []
    options = [_plain(str(option)) for option in column]
    if not 2 <= len(options) <= OPTIONS_AT_MOST:
        raise ValueError(
            f"prompt {prompt_id} has {len(options)} options; give it 2 to {OPTIONS_AT_MOST}, one for each letter"
        )
    return options


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .")


def _holds(text: str, words: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text) is not None
