"""Final answers: numbers in one spelling, and the content of the last \\boxed{}."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from data_prep.recipe import BadRow

_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?")
_BRACE = re.compile(r"\\boxed\s*\{|(?<!\\)[{}]")
_CURRENCY = "$€£"


def normal_number(text: str, thousands: bool = False) -> str | None:
    """Return a plain decimal number without currency, plus sign or needless zeros; None if the text is no number.

    `$34.50` -> `34.5`, `007` -> `7`, `-0` -> `0`. With `thousands` also `1,234` -> `1234`, which elsewhere may be two.
    """
    bare = text.strip().strip(_CURRENCY).replace("\N{MINUS SIGN}", "-").removesuffix(".").strip()
    if thousands and _THOUSANDS.fullmatch(bare):
        bare = bare.replace(",", "")
    if not _NUMBER.fullmatch(bare):
        return None
    value = Decimal(bare)
    if not value:
        return "0"
    written = f"{value:f}"
    return written.rstrip("0").rstrip(".") if "." in written else written


def last_boxed(text: str) -> str | None:
    """Return the content of the last complete \\boxed{...}, braces balanced; None when there is none."""
    found = (0, 0)
    starts: list[int] = []  # of the braces that are open: where a box's content begins, 0 for another brace
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            starts.append(brace.end() if len(brace[0]) > 1 else 0)
        elif starts:
            found = max(found, (starts.pop(), brace.start()))
    return text[slice(*found)].strip() if found[0] else None


def final_answer(value: Any, column: str) -> str:
    """Return the answer in a cell: a number in one spelling, what is boxed, or the text without the $ around it.

    Raise BadRow when there is none. The answer in a list of one is that one; several are joined with commas.
    """
    if isinstance(value, list):
        return ", ".join(final_answer(one, column) for one in value) if value else _missing(column)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or isinstance(value, bool | dict):
        return _missing(column)
    text = str(value).strip()
    boxed = last_boxed(text)
    text = boxed if boxed is not None else text
    if len(text) > 1 and text[0] == text[-1] == "$" and "$" not in text[1:-1]:
        text = text[1:-1].strip()
    return normal_number(text) or text or _missing(column)


def _missing(column: str) -> str:
    raise BadRow(f"no answer in '{column}'")
