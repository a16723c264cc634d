"""Rewards that read an answer out of a response and compare it: gsm8k, math_verify, multiple_choice, numeric_precision."""

from __future__ import annotations

import asyncio
import threading
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.blocks.rl import Reward
from plugins.parameters import check
from records.rollout import Prompt, Trajectory
from rewards.format_match import format_match
from rewards.gsm8k import gsm8k
from rewards.last_number import find_first_number
from rewards.math_verify import math_verify
from rewards.multiple_choice import find_choice, multiple_choice
from rewards.numeric_precision import numeric_precision
from rewards.scoring.service import ScoringService


def trajectory(response: str, answer: Any = None, **columns: Any) -> Trajectory:
    prompt = Prompt("p/0", [{"role": "user", "content": "?"}], answer, "p", columns)
    none, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Trajectory(prompt, "g", 0, none, none, floats, none, np.zeros(0, bool), none, response=response)


@pytest.mark.parametrize(
    ("response", "paid", "paid_for_mark"),
    [
        ("6 * 3 = 18\n#### 18", 1, 1),
        ("#### 17\nno:\n#### 18.0 apples of 20", 1, 1),
        ("#### $18.", 1, 1),
        ("#### **18**\nso it is 99", 1, 1),
        ("#### eighteen, that is\n18", 1, 0),
        ("#### 18\n#### ?", 1, 1),
        ("#### 0\n18", 0, 0),
        ("so 18", 1, 0),
        ("#### 81", 0, 0),
        ("18 ####", 1, 0),
        ("", 0, 0),
    ],
)
def test_gsm8k(response: str, paid: float, paid_for_mark: float) -> None:
    for answer in ("18", 18, "3 * 6 = 18 of 99\n#### 18"):
        assert gsm8k(trajectory(response, answer)) == paid
        assert gsm8k(trajectory(response, answer), mark_required=True) == paid_for_mark


def test_gsm8k_reads_numbers_the_english_way() -> None:
    for written in ("1,800", "1800", "1800.", "1,800.00", "$1,800", "1.8e3"):
        assert gsm8k(trajectory(f"#### {written}", "#### 1,800")) == 1.0, written
    assert gsm8k(trajectory("1.800,00", "1,800")) == 0.0
    assert gsm8k(trajectory("#### 0", "#### 0")) == 1.0
    assert gsm8k(trajectory("#### -5", "-5")) == 1.0


@pytest.mark.parametrize("answer", [None, "", "#### none"])
def test_gsm8k_needs_a_number_in_the_answer(answer: Any) -> None:
    with pytest.raises(ValueError, match="p/0 holds no number"):
        gsm8k(trajectory("18", answer))


@settings(max_examples=50)
@given(st.integers(-(10**9), 10**9))
def test_the_first_number_is_the_first(number: int) -> None:
    assert find_first_number(f" {number:,} of 77") == Fraction(number)
    assert find_first_number("none") is None


@pytest.mark.parametrize(
    ("answer", "response", "paid"),
    [
        ("1/2", "so \\boxed{0.5}", 1),
        ("\\frac{1}{2}", "It is 1/2.", 1),
        ("\\frac{1}{2}", "It is 1/3.", 0),
        ("[0,1)", "the set is $[0, 1)$", 1),
        ("[0,1)", "the set is $[0, 1]$", 0),
        ("\\{1,2\\}", "\\boxed{\\{2,1\\}}", 1),
        ("x^2+1", "$1+x^2$", 1),
        ("x^2+1", "$1+y^2$", 0),
        ("1,800", "\\boxed{1800}", 1),
        (18, "\\boxed{18.0}", 1),
        ("the sum is $2+3=5$, so \\boxed{5}", "It is $5$", 1),
        ("5", "\\boxed{5} or \\boxed{6}", 0),
        ("5", "\\boxed{6}\nThat is wrong. Once more: 2 + 3.\n\\boxed{5}", 1),
        ("5", "\\boxed{5, 6}", 0),
        ("18", "no idea", 0),
        ("18", "", 0),
        ("18", "\\boxed{" * 200, 0),
        ("18", "\\boxed{\\frac{1}{0}}", 0),
    ],
)
def test_math_verify(answer: Any, response: str, paid: float) -> None:
    assert math_verify(trajectory(response, answer)) == paid


def test_math_verify_does_not_wait_for_hostile_expressions() -> None:
    assert math_verify(trajectory("\\boxed{99999999!}", "2"), seconds=1) == 0.0


@pytest.mark.parametrize("answer", [None, "", "???", "$"])
def test_math_verify_needs_an_answer_it_can_read(answer: Any) -> None:
    with pytest.raises(ValueError, match="cannot read the answer of prompt p/0"):
        math_verify(trajectory("18", answer))


def test_math_verify_says_so_where_its_time_outs_cannot_work() -> None:
    caught: list[BaseException] = []

    def elsewhere() -> None:
        try:
            math_verify(trajectory("18", "181"))
        except ValueError as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "thread" in str(caught)


@pytest.mark.parametrize(
    ("response", "choice"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("B) seven", "B"),
        ("**B**", "B"),
        ("The answer is C", "C"),
        ("The answer is (c).", "C"),
        ("the answer is: **C**", "C"),
        ("Answer: C", "C"),
        ("answer: c", "C"),
        ("the answer is A because it fits", "A"),
        ("the answer is a tree", None),
        ("The answer is A tree", None),
        ("\\boxed{D}", "D"),
        ("\\boxed{\\text{(D)}}", "D"),
        ("The answer is A? No, the answer is B.", "B"),
        ("The answer is A or B", None),
        ("(A) or (B)", None),
        ("A, B", None),
        ("Both B and C.", None),
        ("(A) is too small, and (B) fits", "B"),
        ("(A) is too small, (C) fits", "C"),
        ("Answer is B.\n(C) was close.", "B"),
        ("I would say D", "D"),
        ("I think that A tree fits", None),
        ("A is wrong.\nI go with B", "B"),
        ("F", None),
        ("Because", None),
        ("DNA", None),
        ("", None),
    ],
)
def test_choice_found(response: str, choice: str | None) -> None:
    assert find_choice(response, "ABCDE", []) == choice


def test_options_by_their_text() -> None:
    options = ["red", "red wine", "Blue.", "7"]
    pay = lambda response, answer: multiple_choice(trajectory(response, answer, choices=options))  # noqa: E731
    assert pay("It is red wine", "B") == 1.0
    assert pay("It is red wine", "red wine") == 1.0
    assert pay("It is red", "Red") == 1.0
    assert pay("It is red", "red wine") == 0.0
    assert pay("It is blue", "C") == 1.0
    assert pay("red or blue", "A") == 0.0
    assert pay("It is infrared", "A") == 0.0
    assert pay("(C)", "blue") == 1.0
    assert pay("E", "A") == 0.0
    with pytest.raises(ValueError, match="p/0 is 'E', which is none of the letters ABCD and none of the options"):
        pay("E", "E")


def test_multiple_choice_answers() -> None:
    assert multiple_choice(trajectory("c", "(C)")) == 1.0
    assert multiple_choice(trajectory("F", "F"), letters="ABCDEF") == 1.0
    for answer in (None, "", "F", "seven"):
        with pytest.raises(ValueError, match="prompt p/0"):
            multiple_choice(trajectory("A", answer))
    with pytest.raises(ValueError, match="p/0 has 1 options"):
        multiple_choice(trajectory("A", "A", choices=["x"]))
    with pytest.raises(ValueError, match=r"params\.letters"):
        check("reward", "multiple_choice", {"letters": "AA"})


@settings(max_examples=100)
@given(st.text())
def test_any_text_makes_at_most_one_choice(text: str) -> None:
    assert find_choice(text, "ABCD", ["x", "(", "", "x y"]) in ("A", "B", "C", "D", None)


@pytest.mark.parametrize(
    ("kind", "precision", "answer", "response", "paid"),
    [
        ("integer", None, "4", "so 4.0", 1),
        ("integer", None, "4", "so 3.7", 0),
        ("integer", 1.0, 4, "4.01", 0),
        ("float", 2.0, "1.45", "1.4467", 1),
        ("float", 2, "1.45", "1.444", 0),
        ("float", 1.0, "1.4", "it is 1.4467", 1),
        ("float", 1.0, 1.2, "1.25", 1),  # rounds to it one way
        ("float", None, "1.45", "1.4467", 1),
        ("float", None, "1.5e-3", "0.00144", 0),
        ("float", None, "1.5e-3", "0.00151", 1),
        ("list", None, "[0, 8]", "the ages are [0,8]", 1),
        ("list", None, "[0, 8]", "[8, 0]", 0),
        ("list", None, "[0, 8]", "[0, 8, 9]", 0),
        ("list", None, "[0, 8]", "0, 8", 0),
        ("list", 1, "[0.5, 8]", "[1, 2] or rather [0.52, 8.04]", 1),
        ("text", None, "Yes", "Hm.\nyes.", 1),
        ("text", None, "Yes", "no", 0),
        ("text", None, "Yes", "", 0),
        (None, None, "4", "4.2", 0),
        (None, None, "1,800", "1800", 1),
        (None, None, "4.0", "4.04", 1),
        (None, None, "[4]", "[4]", 1),
        (None, None, "four", "Four", 1),
    ],
)
def test_numeric_precision(kind: str | None, precision: Any, answer: Any, response: str, paid: float) -> None:
    assert numeric_precision(trajectory(response, answer, answer_type=kind, precision=precision)) == paid


def test_numeric_precision_with_a_relative_tolerance() -> None:
    asked = trajectory("104", 100, answer_type="integer")
    assert numeric_precision(asked) == 0.0
    assert numeric_precision(asked, relative_tolerance=0.05) == 1.0
    assert numeric_precision(asked, relative_tolerance=0.03) == 0.0


@pytest.mark.parametrize(
    ("answer", "columns", "said"),
    [
        (None, {}, "has no answer"),
        ("x", {"answer_type": "integer"}, "is no integer"),
        ("4", {"answer_type": "list"}, "is no list"),
        ("4", {"answer_type": "number"}, "one of integer, float, list, text"),
        ("4.0", {"precision": "two"}, "column precision is 'two'"),
        ("4.0", {"precision": -1}, "column precision is -1"),
        ("4.0", {"precision": 1.5}, "column precision is 1.5"),
    ],
)
def test_numeric_precision_refuses_bad_rows(answer: Any, columns: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"p/0.*{said}"):
        numeric_precision(trajectory("4", answer, **columns))


@pytest.mark.parametrize(
    ("response", "paid"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>\n", 1),
        ("<think>a</think><answer>4</answer>", 1),
        ("<think></think><answer>4</answer>", 0),
        ("<think>a</think><answer> \n</answer>", 0),
        ("<answer>4</answer><think>a</think>", 0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0),
        ("<think>a<think>b</think></think><answer>4</answer>", 0),
        ("<think>a</think>so <answer>4</answer>", 0),
        ("<think>a</think>", 0),
        ("", 0),
    ],
)
def test_format_of_tags(response: str, paid: float) -> None:
    assert format_match(trajectory(response), tags=["think", "answer"]) == paid


@pytest.mark.parametrize("params", [{}, {"pattern": "a", "tags": ["a"]}, {"tags": []}, {"tags": ["<a>"]}])
def test_format_match_wants_one_of_pattern_and_tags(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="reward 'format_match': params"):
        check("reward", "format_match", params)


def test_math_verify_has_its_time_outs_in_a_scoring_process() -> None:
    async def run() -> list[Trajectory]:
        part = {"function": "math_verify", "params": {"seconds": 1}}
        service = ScoringService(Reward(parts=[part], timeout_seconds=60))  # type: ignore[list-item]
        await service.start()
        try:
            responses = ("\\boxed{99999999!}", "\\boxed{2}")
            return [await service.score(trajectory(response, "2")) for response in responses]
        finally:
            await service.close()

    assert [t.reward for t in asyncio.run(run())] == [0.0, 1.0]
