"""Numbers in one spelling, and boxed answers, against independent readings."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.answers import final_answer, last_boxed, normal_number
from data_prep.recipe import BadRow


@given(st.integers(-(10**12), 10**12), st.integers(0, 6), st.booleans())
def test_a_number_keeps_its_value_and_has_one_spelling(digits: int, places: int, plus: bool) -> None:
    sign = "-" if digits < 0 else "+" if plus else ""
    text = str(abs(digits)).rjust(places + 1, "0")
    whole, part = (text[:-places], text[-places:]) if places else (text, "")
    plain = normal_number(f"{sign}00{whole}.{part}00")
    assert plain is not None
    assert Fraction(plain) == Fraction(digits, 10**places)
    assert normal_number(plain) == plain
    grouped = normal_number(f"{sign}{int(whole):,}.{part}", thousands=True)
    assert grouped == plain


@pytest.mark.parametrize("text", ["", "five", "1/2", "1 2", "1,2", "--1", "1e3", "nan", "٣", "1,23", "12,345"])
def test_no_number(text: str) -> None:
    assert normal_number(text) is None


def test_thousands_only_where_a_comma_can_be_nothing_else() -> None:
    assert normal_number("12,345", thousands=True) == "12345"
    assert normal_number("1,23", thousands=True) is None
    assert [normal_number(t) for t in ("$5.50", "\N{MINUS SIGN}3", "7.", ".50", "-0")] == ["5.5", "-3", "7", "0.5", "0"]


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed {\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\text{a \boxed{b}}}", "b"),
        ("nothing", None),
        (r"\boxed", None),
    ],
)
def test_last_boxed(text: str, inside: str | None) -> None:
    assert last_boxed(text) == inside


def test_a_megabyte_of_open_boxes_is_read_in_one_pass() -> None:
    started = time.process_time()
    assert last_boxed(r"\boxed{" * 150_000 + "}") == ""
    assert time.process_time() - started < 10


def test_final_answers() -> None:
    assert [final_answer(v, "a") for v in (33, 142.0, "033", "$x+1$", "$a$ and $b$", ["$1$"], ["-1", "2"])] == [
        "33",
        "142",
        "33",
        "x+1",
        "$a$ and $b$",
        "1",
        "-1, 2",
    ]
    for nothing in (None, "", " ", [], "$$", True, {}):
        with pytest.raises(BadRow, match="no answer in 'a'"):
            final_answer(nothing, "a")
