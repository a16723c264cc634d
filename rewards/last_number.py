"""Reward responses whose last number is the answer, compared as numbers."""

from __future__ import annotations

import re
from collections import deque
from decimal import Decimal
from fractions import Fraction

from records.rollout import Trajectory

# A minus is a sign unless it follows a digit, a letter or a closing bracket: in `4-1` and `x-1` it subtracts.
# A sign may stand before or after a currency mark. Digits are ASCII only. `1,800` is one number, `1,80` two.
_SIGN = r"(?:(?<![0-9A-Za-z_)\]}])[-\u2212])?"
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+"
_NUMBER = rf"(?P<sign>{_SIGN}[$\u20ac\u00a3]?{_SIGN})(?P<digits>(?:{_DIGITS})(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?)"
NUMBER = re.compile(_NUMBER)
MOST_DIGITS = 10_000  # reading a number exactly takes time that grows with the square of its length
FRACTION = re.compile(_NUMBER + r"(?:\s?/\s?(?P<over>[0-9]{1,18}))?")


def last_number(trajectory: Trajectory, tolerance: float = 0.0) -> float:
    """Return 1 when the response's last number equals the answer's, else 0; `18`, `18.`, `18.0`, `$18` are equal.

    The answer may itself be a text that ends with its number (`... #### 18`). `3/4` is read as one number only when the
    answer is written as a fraction, so that `8/2` is not paid for 4. `tolerance` is the largest absolute difference.

    Raises:
        ValueError: the answer holds no number.
    """
    answer = str(trajectory.prompt.answer)
    fractions = "/" in answer
    expected = find_last_number(answer, fractions)
    if expected is None or trajectory.prompt.answer is None:
        raise ValueError(
            f"the answer of prompt {trajectory.prompt.prompt_id} holds no number: {answer[:80]!r}; correct the row, or "
            "use another reward"
        )
    given = find_last_number(trajectory.response, fractions)
    return float(given is not None and abs(given - expected) <= tolerance)


def find_last_number(text: str, fractions: bool = False) -> Fraction | None:
    """Return the last number in a text, exactly; None when there is none, or it has more than 10,000 digits. With
    `fractions`, `3/4` is one number."""
    last = deque((FRACTION if fractions else NUMBER).finditer(text), maxlen=1)
    return _value(last[0]) if last else None


def find_first_number(text: str) -> Fraction | None:
    """Return the first number in a text, exactly; None when there is none."""
    match = NUMBER.search(text)
    return _value(match) if match else None


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match["digits"]) > MOST_DIGITS:
        return None
    # Decimal is used because int() refuses texts of more than 4,300 digits, which a model may well write.
    value = Fraction(Decimal(match["digits"].replace(",", "")))
    over = match.groupdict().get("over")
    if over and int(over):
        value /= int(over)
    return -value if len(match["sign"].strip("$\u20ac\u00a3")) == 1 else value
