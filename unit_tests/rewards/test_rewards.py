"""The rewards that ship, and how their names are found."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.kinds import listed
from plugins.parameters import check
from records.rollout import Prompt, Trajectory
from rewards.ended import ended
from rewards.exact_match import exact_match
from rewards.format_match import format_match
from rewards.last_number import find_last_number, last_number
from rewards.length import length
from rewards.reasoning_gym_score import reasoning_gym_score
from rewards.repetition import repetition
from rewards.soft_overlong import soft_overlong


def trajectory(response: str, answer: Any = None, finish_reason: str = "stop", **columns: Any) -> Trajectory:
    prompt = Prompt("p/0", [{"role": "user", "content": "?"}], answer, "p", columns)
    return Trajectory(
        prompt, "g", 0, np.zeros(2, np.int32), np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32),
        np.ones(1, np.bool_), np.zeros(1, np.int32), response=response, finish_reason=finish_reason,
    )  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["18", "18.", "18.0", "$18", "**18**", "\\boxed{18}", "= 18!", "18,", "2 + 16 = 18", "(18)", "+18", "018", "1.8e1"],
)
def test_eighteen_in_every_dress(text: str) -> None:
    assert last_number(trajectory(text, "18")) == 1.0
    assert last_number(trajectory(text, 18)) == 1.0
    assert last_number(trajectory(text, "81")) == 0.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,800", 1800),
        ("$1,800.50.", Fraction(3601, 2)),
        ("-4", -4),
        ("4-1", 1),
        ("4 - 1", 1),
        ("x-1", 1),
        ("(2)-1", 1),
        ("= -1", -1),
        ("-$4", -4),
        ("$-4", -4),
        ("7 \u2212 9 = \u22122", -2),
        (".5", Fraction(1, 2)),
        ("-.5", Fraction(-1, 2)),
        ("1,80", 80),
        ("12345,678", 678),
        ("1/2", 2),
        ("1e3", 1000),
        ("\u0663", None),  # a digit of another script
        ("", None),
        ("-", None),
    ],
)
def test_last_number_found(text: str, value: Any) -> None:
    assert find_last_number(text) == value


def test_numbers_of_more_digits_than_python_reads_as_int() -> None:
    assert bool(find_last_number("9" * 5000) == 10**5000 - 1)


def test_fractions_only_for_answers_written_as_fractions() -> None:
    assert last_number(trajectory("it is -3/4.", "-3/4")) == 1.0
    assert last_number(trajectory("it is -0.75", "-3/4")) == 1.0
    assert last_number(trajectory("8/2", "4")) == 0.0  # the task repeated is no answer
    assert find_last_number("1/0", fractions=True) == 1


def test_answer_text_ends_in_its_number() -> None:
    assert last_number(trajectory("1,800", "He earns 20 * 90.\n#### 1,800")) == 1.0


def test_tolerance_is_absolute() -> None:
    assert last_number(trajectory("3.14", "3.14159")) == 0.0
    assert last_number(trajectory("3.14", "3.14159"), tolerance=0.01) == 1.0


@pytest.mark.parametrize("answer", [None, "", "none", float("nan")])
def test_answer_without_a_number_is_an_error(answer: Any) -> None:
    with pytest.raises(ValueError, match="p/0"):
        last_number(trajectory("3", answer))


@settings(max_examples=200)
@given(
    st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9),
    st.sampled_from(["{}", "the answer is {}.", "2 + 3 = {}", "**{}**", "first 7, then {}\n", "${}", "({})"]),
    st.booleans(),
)
def test_any_written_number_is_read_back(number: Any, frame: str, thousands: bool) -> None:
    written = f"{number:,}" if thousands else str(number)
    assert find_last_number(frame.format(written)) == Fraction(number)


@settings(max_examples=200)
@given(st.text())
def test_any_text_is_survived(text: str) -> None:
    find_last_number(text)
    find_last_number(text, fractions=True)


def test_ended() -> None:
    assert ended(trajectory("", finish_reason="stop")) == 1.0
    assert ended(trajectory("", finish_reason="length")) == 0.0
    assert ended(trajectory("", finish_reason="abort")) == 0.0


def test_exact_match() -> None:
    assert exact_match(trajectory(" Paris\n", "Paris")) == 1.0
    assert exact_match(trajectory("paris", "Paris")) == 0.0
    assert exact_match(trajectory("paris", "Paris"), ignore_case=True) == 1.0
    assert exact_match(trajectory("4", 4)) == 1.0
    with pytest.raises(ValueError, match="no answer"):
        exact_match(trajectory("4"))


def reasoning_gym_trajectory(response: str, task: str = "chain_sum", **params: Any) -> Trajectory:
    import reasoning_gym

    entry = reasoning_gym.create_dataset(task, size=1, seed=3, **params)[0]
    return trajectory(
        response.replace("ANSWER", entry["answer"]), entry["answer"], reasoning_gym=task, params=params, entry=entry
    )


def test_reasoning_gym_score_is_the_tasks_own() -> None:
    assert reasoning_gym_score(reasoning_gym_trajectory("ANSWER\n", min_digits=1, max_digits=1)) == 1.0
    assert reasoning_gym_score(reasoning_gym_trajectory("77777")) < 0.1
    assert reasoning_gym_score(reasoning_gym_trajectory("")) < 0.1


def test_reasoning_gym_score_takes_the_answer_out() -> None:
    assert reasoning_gym_score(reasoning_gym_trajectory("I think\n\nANSWER\n"), take="last_line") == 1.0
    assert reasoning_gym_score(reasoning_gym_trajectory("It is ANSWER."), take="last_number") == 1.0
    assert reasoning_gym_score(reasoning_gym_trajectory("no idea"), take="last_number") < 0.1
    with pytest.raises(ValueError, match="last_line"):
        reasoning_gym_score(reasoning_gym_trajectory("1"), take="first")  # type: ignore[arg-type]


def test_reasoning_gym_score_needs_its_columns() -> None:
    with pytest.raises(ValueError, match="does not come from reasoning_gym"):
        reasoning_gym_score(trajectory("4", "4"))


def test_shipped_rewards() -> None:
    assert list(listed("reward")) == [
        "code_execution",
        "ended", "exact_match", "format_match", "gsm8k", "last_number", "length", "llm_judge", "math_verify",
        "multiple_choice", "numeric_precision", "reasoning_gym_score", "relative_length", "repetition", "reward_model", "soft_overlong",
    ]  # fmt: skip


def test_params_are_fitted_to_the_function() -> None:
    check("reward", "last_number", {"tolerance": 0.1})
    check("reward", "last_number", {"tolerance": 1})  # an integer is a number
    with pytest.raises(ValueError, match=r"params.tolerence: unknown key; did you mean tolerance\?"):
        check("reward", "last_number", {"tolerence": 0.1})


@pytest.mark.parametrize(
    ("function", "params", "said"),
    [
        (last_number, {"tolerance": "0.1"}, "params.tolerance: must be a number; given '0.1'"),
        (last_number, {"tolerance": True}, "params.tolerance: must be a number; given true"),
        (last_number, {"tolerance": float("nan")}, "params.tolerance: must be a finite number; given nan"),
        (exact_match, {"ignore_case": 1}, "params.ignore_case: must be true or false; given 1"),
        (reasoning_gym_score, {"take": "all"}, "params.take: must be 'response', 'last_line' or 'last_number'"),
        (soft_overlong, {"max_tokens": 8}, "params.buffer_tokens: is missing"),
        (soft_overlong, {"max_tokens": 8, "buffer_tokens": 0}, "params.buffer_tokens: must be at least 1; given 0"),
        (soft_overlong, {"max_tokens": 8, "buffer_tokens": 9}, "params.buffer_tokens: 9 is more than max_tokens 8"),
        (soft_overlong, {"max_tokens": 8, "buffer_tokens": 4, "penalty": -1.0}, "params.penalty: must be at least 0"),
        (format_match, {"pattern": "(a"}, "params.pattern: '(a' is no regular expression: missing )"),
        (length, {"low": 5, "high": 4}, "params.low: 5 is above high 4"),
        (length, {"low": 1, "high": 4, "target": 9}, "params.target: 9 is not between low 1 and high 4"),
        (length, {"low": 1.5, "high": 4}, "params.low: must be a whole number; given 1.5"),
        (repetition, {"n": 0, "penalty": "x"}, "params.n: must be at least 1; given 0; params.penalty: must be"),
    ],
)
def test_wrong_params_are_refused_before_the_run(function: Any, params: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        check("reward", function.__name__, params)
    assert str(caught.value).startswith(f"reward '{function.__name__}': ") and said in str(caught.value)


def generated(tokens: list[int], observed: tuple[int, ...] = (), turns: list[int] | None = None) -> Trajectory:
    """A response of these tokens; those at the places `observed` the environment said."""
    n = len(tokens)
    is_action = np.array([i not in observed for i in range(n)], dtype=np.bool_)
    return Trajectory(
        Prompt("p/0", []), "g", 0, np.zeros(2, np.int32), np.array(tokens, np.int32), np.zeros(n, np.float32),
        np.zeros(n, np.int32), is_action, np.array(turns or [0] * n, np.int32),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "paid"), [(0, 0.0), (75, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (120, -1.0)]
)
def test_soft_overlong(tokens: int, paid: float) -> None:
    # L_max 100, L_buf 20: by hand from DAPO's equation 13
    assert soft_overlong(generated([7] * tokens), max_tokens=100, buffer_tokens=20) == paid
    assert soft_overlong(generated([7] * tokens), max_tokens=100, buffer_tokens=20, penalty=0.5) == paid / 2
    assert soft_overlong(generated([7] * (tokens + 50), observed=tuple(range(50))), 100, 20) == paid


@pytest.mark.parametrize(
    ("pattern", "response", "paid"),
    [
        (r"<think>.+</think>\s*\d+", "<think>a\nb</think>\n18", 1.0),
        (r"<think>.+</think>\s*\d+", "<think>a</think> 18 apples", 0.0),
        (r"<think>.+</think>\s*\d+", " <think>a</think> 18", 0.0),
        (r"\d+", "18", 1.0),
        (r"\d+", "18\n", 0.0),
        (r"\d*", "", 1.0),
    ],
)
def test_format_match(pattern: str, response: str, paid: float) -> None:
    assert format_match(trajectory(response), pattern) == paid


@pytest.mark.parametrize(
    ("tokens", "flat", "peak"), [(9, 0, 0), (10, 1, 0), (15, 1, 0.5), (20, 1, 1), (30, 1, 0.75), (60, 1, 0), (61, 0, 0)]
)
def test_length(tokens: int, flat: float, peak: float) -> None:
    assert length(generated([7] * tokens), low=10, high=60) == flat
    assert length(generated([7] * tokens), low=10, high=60, target=20) == peak


def test_length_with_the_target_at_an_end() -> None:
    paid = [length(generated([7] * n), low=0, high=4, target=0) for n in range(6)]
    assert paid == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert length(generated([7] * 3), low=3, high=3, target=3) == 1.0


@pytest.mark.parametrize(
    ("tokens", "n", "paid"),
    [
        ([1, 2, 3, 4], 2, 0.0),
        ([1, 2, 1, 2, 1], 2, -0.5),  # 12 21 12 21: 2 distinct of 4
        ([5, 5, 5, 5], 1, -0.75),
        ([5, 5, 5], 2, -0.5),
        ([1, 2], 3, 0.0),
        ([], 1, 0.0),
    ],
)
def test_repetition(tokens: list[int], n: int, paid: float) -> None:
    assert repetition(generated(tokens), n=n) == paid
    assert repetition(generated(tokens), n=n, penalty=0.5) == paid / 2


def test_repetition_counts_what_was_generated_within_turns() -> None:
    said = generated([1, 2, 9, 9, 9, 1, 2], observed=(2, 3, 4), turns=[0, 0, 0, 0, 0, 1, 1])
    assert repetition(said, n=2) == -0.5  # 12 and 12; 21 across the turns is no pair


def test_rewards_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, rewards.scoring.service, rewards.scoring.worker\n"
        "from plugins.parameters import check, find\n"
        "from plugins.kinds import listed\n"
        "assert 'reasoning_gym' not in sys.modules\n"
        "[find('reward', name) for name in listed('reward')]\n"
        "check('reward', 'length', {'low': 1, 'high': 4})\n"
        "heavy = {'torch', 'transformers', 'vllm', 'ray'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
