"""Which responses filters leave out of the loss and of the baseline."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.blocks.objective import Filter
from plugins.kinds import listed
from plugins.parameters import check
from records.rollout import Group, Prompt, Trajectory, paid_alike
from rollouts.filter import GroupFilter, apply_filters, filters_of
from rollouts.filters.overlong import overlong
from rollouts.filters.pass_rate import pass_rate
from rollouts.filters.zero_variance import zero_variance


def group(*rewards: float | None, cut: tuple[int, ...] = ()) -> Group:
    """Responses with these rewards; those at the indices `cut` were truncated."""
    prompt = Prompt("p/0", [])
    none = np.zeros(0, np.int32)
    made = [
        Trajectory(
            prompt, "g", i, none, none, np.zeros(0, np.float32), none, np.zeros(0, np.bool_), none, reward=reward,
            reward_error=None if reward is not None else "failed", finish_reason="length" if i in cut else "stop",
        )
        for i, reward in enumerate(rewards)
    ]  # fmt: skip
    return Group("g", prompt, made)


def blocks(*configured: Any) -> list[GroupFilter]:
    return filters_of([Filter.model_validate(block) for block in configured])


def left(one: Group) -> tuple[list[int], list[int]]:
    """Samples that are trained on, and those in the baseline."""
    return [t.sample for t in one.trained], [t.sample for t in one.baseline]


def test_shipped_filters_and_whether_they_refill() -> None:
    assert list(listed("filter")) == ["overlong", "pass_rate", "zero_variance"]
    assert {name: blocks(name)[0].refill for name in listed("filter")} == {
        "overlong": False, "pass_rate": True, "zero_variance": True,
    }  # fmt: skip
    assert blocks({"function": "zero_variance", "refill": False})[0].refill is False
    assert blocks({"function": "overlong", "refill": True})[0].refill is True


def test_zero_variance() -> None:
    assert not zero_variance(group(1.0, 1.0, 1.0 + 5e-7))
    assert zero_variance(group(1.0, 1.0, 1.0 + 5e-6))
    assert not zero_variance(group(1.0, 1.2), tolerance=0.25)
    assert not zero_variance(group(None, 0.5, None)), "one response alone has no advantage"
    assert zero_variance(group(None, 0.5, 0.0))


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_not_finite_are_never_alike(reward: float) -> None:
    for rewards in ((reward, reward), (1.0, reward), (reward, 1.0), (reward,)):
        assert not paid_alike(group(*rewards).scored)
        marked = group(*rewards)
        assert apply_filters(blocks("zero_variance", "pass_rate", "overlong"), [marked]) == [None]
        assert len(marked.trained) == len(rewards), "the update has to see it"


@pytest.mark.parametrize(
    ("rewards", "params", "kept"),
    [
        ((0, 0, 0, 0), {}, False),
        ((1, 1, 1, 1), {}, False),
        ((1, 0, 0, 0), {}, True),
        ((1, 1, 1, 0), {}, True),
        ((1, 0, 0, 0), {"low": 0.25}, False),  # bounds are left out
        ((1, 1, 0, 0), {"low": 0.25, "high": 0.75}, True),
        ((1, 1, 1, 0), {"low": 0.25, "high": 0.75}, False),
        ((0.5, 0.4, 0.4, 0.4), {}, True),  # a reward at the threshold passes
        ((0.5, 0.4, 0.4, 0.4), {"threshold": 0.6}, False),
        ((1, None, 1, None), {}, False),  # rates are over scored responses
    ],
)
def test_pass_rate(rewards: tuple[float, ...], params: dict[str, float], kept: bool) -> None:
    assert pass_rate(group(*rewards), **params) is kept


def test_overlong_is_one_by_one() -> None:
    assert overlong(group(1.0, 0.0, 1.0, cut=(1,))) == [True, False, True]


def test_dropped_responses_leave_the_baseline_unless_told_to_stay() -> None:
    gone, stays = group(1.0, 0.0, 0.5, cut=(1,)), group(1.0, 0.0, 0.5, cut=(1,))
    assert apply_filters(blocks("overlong"), [gone]) == [None]
    apply_filters(blocks({"function": "overlong", "in_baseline": True}), [stays])
    assert left(gone) == ([0, 2], [0, 2]) and gone.trajectories[1].dropped_by == "overlong"
    assert left(stays) == ([0, 2], [0, 1, 2]) and stays.trajectories[1].dropped_by == "overlong"


def test_a_filter_judges_what_the_earlier_ones_left() -> None:
    filters = blocks("overlong", "zero_variance")
    one = group(1.0, 0.0, 1.0, cut=(1,))
    assert apply_filters(filters, [one]) == [filters[1]]
    assert [t.dropped_by for t in one.trajectories] == ["zero_variance", "overlong", "zero_variance"]
    stays = blocks({"function": "overlong", "in_baseline": True}, "zero_variance")
    other = group(1.0, 0.0, 1.0, cut=(1,))
    assert apply_filters(stays, [other]) == [None], "the cut response's 0 makes the others' 1 an advantage"
    assert left(other) == ([0, 2], [0, 1, 2])


def test_a_group_of_which_nothing_is_left_is_out_whole() -> None:
    filters = blocks({"function": "overlong", "in_baseline": True, "refill": True})
    one = group(1.0, 0.0, None, cut=(0, 1))
    assert apply_filters(filters, [one]) == [filters[0]]
    assert left(one) == ([], []), "a baseline that nobody uses is not reported as one"


def test_groups_without_a_score_are_the_errors_business() -> None:
    one = group(None, None)
    assert apply_filters(blocks("zero_variance"), [one]) == [None]
    assert [t.dropped_by for t in one.trajectories] == [None, None]


def test_a_failed_response_is_not_counted_as_dropped() -> None:
    one = group(1.0, None, 1.0)
    apply_filters(blocks("zero_variance"), [one])
    assert [t.dropped_by for t in one.trajectories] == ["zero_variance", None, "zero_variance"]


@settings(max_examples=60)
@given(st.lists(st.lists(st.sampled_from([None, 0.0, 0.5, 1.0]), min_size=1, max_size=6), max_size=5), st.data())
def test_nothing_is_lost_and_nothing_is_counted_twice(rewards: list[list[float | None]], data: st.DataObject) -> None:
    cut = [tuple(i for i in range(len(r)) if data.draw(st.booleans())) for r in rewards]
    groups = [group(*r, cut=c) for r, c in zip(rewards, cut, strict=True)]
    stays = data.draw(st.booleans())
    filters = blocks({"function": "overlong", "in_baseline": stays}, "pass_rate", "zero_variance")
    outcome = apply_filters(filters, groups)
    for one, by in zip(groups, outcome, strict=True):
        dropped = [t for t in one.scored if t.dropped_by is not None]
        assert len(one.trained) + len(dropped) == len(one.scored)
        assert (by is not None) == (bool(one.scored) and not one.trained)
        in_baseline = one.trained if not stays or by else one.trained + dropped
        assert sorted(t.sample for t in one.baseline) == sorted(t.sample for t in in_baseline)


OWN = """
def long_answers(group, least=2):
    return [len(t.response) >= least for t in group.trajectories]

def broken(group):
    return group.no_such_thing

def number(group):
    return 1

def short(group):
    return [True]
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "filter_lab.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("filter_lab", None)


def test_a_users_own_filter(lab: Any) -> None:
    one = group(1.0, 0.0)
    one.trajectories[0].response = "long"
    filters = blocks({"function": "filter_lab:long_answers", "params": {"least": 3}}, "filter_lab:long_answers")
    assert [f.name for f in filters] == ["long_answers", "long_answers#2"] and not filters[0].refill
    assert apply_filters(filters, [one]) == [None] and left(one) == ([0], [0])


@pytest.mark.parametrize(
    ("name", "said"),
    [("broken", "AttributeError"), ("number", "it returned '1'"), ("short", r"a list of 2 bools")],
)
def test_a_filter_that_fails_is_named(lab: Any, name: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf"filter '{name}' on prompt p/0: .*{said}"):
        apply_filters(blocks(f"filter_lab:{name}"), [group(1.0, 0.0)])


def test_unknown_filters_and_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"did you mean overlong\?"):
        blocks("overlongs")
    with pytest.raises(ValueError, match=r"filter 'pass_rate': low 0.8 is not below high 0.2"):
        check("filter", "pass_rate", {"low": 0.8, "high": 0.2})
    with pytest.raises(ValueError, match=r"params.low: must be at most 1.0; given 25"):
        check("filter", "pass_rate", {"low": 25})
