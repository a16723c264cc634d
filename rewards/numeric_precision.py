"""Reward the right number at the precision that its row states, as in MathVista (arXiv 2310.02255)."""

from __future__ import annotations

import ast
import re
from fractions import Fraction
from typing import Annotated, Any

from pydantic import Field

from records.rollout import Trajectory
from rewards.last_number import NUMBER, find_last_number

KINDS = ("integer", "float", "list", "text")
MOST_ITEMS = 1000  # of a list; a longer one is no answer
LIST = re.compile(r"\[([^\[\]]*)\]")


def numeric_precision(
    trajectory: Trajectory,
    type_column: str = "answer_type",
    precision_column: str = "precision",
    relative_tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.0,
) -> float:
    """Return 1 when the response's answer equals the expected one at the row's precision, else 0.

    What is compared depends on the row's type. `integer`: the last number, exactly. `float`: the last number, within
    half a unit of the last of `precision` decimals (at 2, 1.445 equals both 1.45 and 1.44). `list`: the numbers in the
    last `[...]`, each as a float, in order. `text`: the last line, without case, outer white space and full stop. With
    `relative_tolerance`, a number may also differ by this share of the expected one.

    The type of a row without one is inferred from its answer. A missing precision is the number of decimals with which
    the answer (in a list, each number) is written.

    Raises:
        ValueError: the row has no answer, the answer does not fit the type, or type or precision are unknown.
    """
    prompt = trajectory.prompt
    where = f"prompt {prompt.prompt_id}"
    if prompt.answer is None:
        raise ValueError(f"{where} has no answer to compare with; set data.sources[].answer_column")
    answer = str(prompt.answer).strip()
    kind = prompt.columns.get(type_column) or _kind_of(answer)
    if kind not in KINDS:
        raise ValueError(f"{where}: column {type_column} is {kind!r}; it must be one of {', '.join(KINDS)}")
    if kind == "text":
        lines = trajectory.response.strip().splitlines() or [""]
        return float(lines[-1].strip(" .*").casefold() == answer.strip(" .").casefold())
    expected = _numbers(answer, kind)
    if not expected:
        raise ValueError(f"{where}: the answer {answer[:80]!r} is no {kind}; correct it, or column {type_column}")
    precision = _precision(prompt.columns.get(precision_column), where, precision_column)
    given = _numbers(trajectory.response, kind)
    if len(given) != len(expected):
        return 0.0
    return float(
        all(
            abs(g - e) <= max(_tolerance(kind, precision, decimals), Fraction(relative_tolerance) * abs(e))
            for (g, _), (e, decimals) in zip(given, expected, strict=True)
        )
    )


def _tolerance(kind: str, precision: int | None, decimals_written: int) -> Fraction:
    """Return half a unit in the last place; 0 for integers."""
    if kind == "integer":
        return Fraction(0)
    return Fraction(1, 2 * 10 ** (decimals_written if precision is None else precision))


def _numbers(text: str, kind: str) -> list[tuple[Fraction, int]]:
    """Return the numbers of an answer, each with the number of decimals it is written with; [] when it has none."""
    if kind == "list":
        lists = LIST.findall(text)
        texts = lists[-1].split(",") if lists else []
        items = [_numbers(text, "float") for text in texts] if len(texts) <= MOST_ITEMS else []
        return [numbers[0] for numbers in items] if items and all(items) else []
    number = find_last_number(text)
    if number is None:
        return []
    digits = list(NUMBER.finditer(text))[-1]["digits"]
    mantissa, _, exponent = digits.lower().partition("e")
    return [(number, max(0, len(mantissa.partition(".")[2]) - int(exponent or 0)))]


def _precision(value: Any, where: str, column: str) -> int | None:
    """Return the number of decimals, which MathVista writes as a float such as 1.0; None when the row has none."""
    if value is None or value == "" or value != value:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number <= 30 or number != int(number):
        raise ValueError(f"{where}: column {column} is {value!r}; it must be a number of decimals from 0 to 30")
    return int(number)


def _kind_of(answer: str) -> str:
    try:
        value = ast.literal_eval(answer.replace(",", "") if not answer.startswith("[") else answer)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return "text"
    return {int: "integer", float: "float", list: "list"}.get(type(value), "text")
