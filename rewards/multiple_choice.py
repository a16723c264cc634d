"""Paid for choosing the right one of lettered options."""

from __future__ import annotations

import re
from typing import Any

from plugins.lookup import checked_by
from records.rollout import Trajectory

OPTIONS_AT_MOST = 26
# Words that may follow the letter A where it is a choice; before other words it is an article.
AFTER_A = "because|since|as|and|or|is|which"

JOINER = r"[*)}\s]*(?:or|and|/|,|&)[*(\s]*"


def _letters_are_letters(letters: str, options_column: str | None) -> None:
    if not re.fullmatch("[A-Z]{2,26}", letters) or len(set(letters)) != len(letters):
        raise ValueError(f"params.letters: {letters!r} must be at least two different letters from A to Z")


@checked_by(_letters_are_letters)
def multiple_choice(trajectory: Trajectory, letters: str = "ABCDE", options_column: str | None = "choices") -> float:
    """1 when the response chooses the option that the answer names, else 0.

    The answer is a letter, or an option's text when the row has a list of them in `options_column` (their letters are
    A, B, ... in order). What the response chooses is, first found first taken: a boxed letter or `answer is C`; a letter
    in brackets `(C)`; a last line that begins with a letter `C.`, `C)` or is one; in the last line a capital letter of
    its own, or the text of exactly one option. Of several of a kind the last; two of them joined (`A or B`) are no choice.

    Raises ValueError when the answer is neither a letter nor an option.
    """
    prompt = trajectory.prompt
    options = _options(prompt.columns.get(options_column) if options_column else None, prompt.prompt_id)
    if options:
        letters = "".join(chr(ord("A") + i) for i in range(len(options)))
    answer = "" if prompt.answer is None else _plain(str(prompt.answer))
    wanted = letters[options.index(answer)] if answer in options else answer.strip("().:").upper()
    if len(wanted) != 1 or wanted not in letters:
        raise ValueError(
            f"the answer of prompt {prompt.prompt_id} is {str(prompt.answer)[:80]!r}, which is none of the letters {letters}"
            + (
                f" and none of the options {options}"
                if options
                else "; params.options_column names the options' column"
            )
        )
    return float(find_choice(trajectory.response, letters, options) == wanted)


def find_choice(response: str, letters: str, options: list[str]) -> str | None:
    """The letter a response chooses, or None. `options` are the options' plain texts in the letters' order, or empty."""
    one = f"[{letters}{letters.lower()}]"
    own = f"(?:[{letters.replace('A', '')}]|A(?! (?!{AFTER_A})[a-z]))" if "A" in letters else f"[{letters}]"
    lines = [line.strip() for line in response.splitlines() if line.strip()]
    last = lines[-1].strip("*_ ") if lines else ""
    said = rf"(?i:answer|choice|option)\s*(?i:is)?\s*:?[\s*_$]*(?:\(\s*({one})\s*\)|({own})(?![A-Za-z0-9'])|({one})\s*[.)]?\s*$)"
    for pattern, text in (
        (rf"\\boxed\{{\s*(?:\\text\{{\s*)?\(?({one})\)?\s*\}}|{said}", response),
        (rf"\(\s*({one})\s*\)", response),
        (rf"^\(?({one})\s*(?:[.):]|$)", last),
        (rf"(?<![A-Za-z0-9'])({own})(?![A-Za-z0-9'])", last),
    ):
        found = list(re.finditer(pattern, text, re.MULTILINE))
        if found:
            before, behind = text[: found[-1].start()], text[found[-1].end() :]
            joined = re.match(rf"{JOINER}{one}(?![A-Za-z0-9'])", behind) or re.search(
                rf"(?<![A-Za-z0-9']){one}{JOINER}$", before
            )
            return None if joined else next(g for g in found[-1].groups() if g).upper()
    named = [i for i, option in enumerate(options) if option and _holds(_plain(last), option)]
    # "red wine" also holds "red": an option within another that was named is not named itself.
    named = [i for i in named if not any(i != j and _holds(options[j], options[i]) for j in named)]
    return letters[named[0]] if len(named) == 1 else None


def _options(column: Any, prompt_id: str) -> list[str]:
    if column is None:
        return []
    options = [_plain(str(option)) for option in column]
    if not 2 <= len(options) <= OPTIONS_AT_MOST:
        raise ValueError(f"prompt {prompt_id} has {len(options)} options; from 2 to {OPTIONS_AT_MOST} have letters")
    return options


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .")


def _holds(text: str, words: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text) is not None
