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

from rewards.ended import ended
from rewards.exact_match import exact_match
from rewards.find import check_params, find_reward, reward_names
from rewards.last_number import find_last_number, last_number
from rewards.reasoning_gym_score import reasoning_gym_score
from rollouts.records import Prompt, Trajectory


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


def test_every_shipped_reward_is_found_by_its_file() -> None:
    assert reward_names() == ["ended", "exact_match", "last_number", "reasoning_gym_score"]
    for name in reward_names():
        assert find_reward(name).__name__ == name
    assert find_reward("rewards.last_number:last_number") is last_number
    assert find_reward("rewards.last_number") is last_number


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("last_numbr", "did you mean 'last_number'"),
        ("service", "there is no such reward"),
        ("no_such_lab.rewards:score", "there is no module no_such_lab"),
        ("rewards.last_number:last_numbr", "did you mean 'last_number'"),
    ],
)
def test_unknown_rewards_are_refused(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        find_reward(name)
    assert name in str(error.value)


def test_a_reward_that_does_not_import(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_something.py").write_text("import not_installed_at_all\n")
    (tmp_path / "bad_syntax.py").write_text("def score(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"needs_something does not import.*not_installed_at_all"):
        find_reward("needs_something:score")
    with pytest.raises(ValueError, match="bad_syntax does not import: SyntaxError"):
        find_reward("bad_syntax:score")


def test_params_are_fitted_to_the_function() -> None:
    check_params(last_number, "last_number", {"tolerance": 0.1})
    with pytest.raises(ValueError, match="takes: tolerance"):
        check_params(last_number, "last_number", {"tolerence": 0.1})


def test_rewards_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, rewards.find as f, rewards.service, rewards.worker\n"
        "assert 'reasoning_gym' not in sys.modules\n"
        "[f.find_reward(n) for n in f.reward_names()]\n"
        "heavy = {'torch', 'transformers', 'vllm', 'ray'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
