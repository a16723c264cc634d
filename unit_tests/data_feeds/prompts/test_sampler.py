"""The order in which prompts are asked."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_feeds.prompts.sampler import PromptSampler, ShuffledPrompts
from records.rollout import Group, Prompt, Trajectory


def prompts(n: int) -> list[Prompt]:
    return [Prompt(f"p/{i}", []) for i in range(n)]


def ids(batch: list[Prompt]) -> list[str]:
    return [p.prompt_id for p in batch]


@settings(max_examples=50)
@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 3))
def test_every_epoch_is_a_permutation(n: int, k: int, seed: int) -> None:
    sampler: PromptSampler = ShuffledPrompts(prompts(n), seed)
    drawn: list[str] = []
    while len(drawn) < 3 * n:
        drawn += ids(sampler.next(k))
        sampler.observe([])
    for epoch in range(3):
        assert sorted(drawn[epoch * n : (epoch + 1) * n]) == sorted(ids(prompts(n)))


@settings(max_examples=50)
@given(st.integers(1, 20), st.lists(st.integers(0, 25), min_size=2, max_size=8), st.integers(0, 7))
def test_resumed_equals_uninterrupted(n: int, sizes: list[int], cut: int) -> None:
    whole = ShuffledPrompts(prompts(n), 1)
    expected = [ids(whole.next(k)) for k in sizes]
    first, second = ShuffledPrompts(prompts(n), 1), ShuffledPrompts(prompts(n), 1)
    got = [ids(first.next(k)) for k in sizes[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    got += [ids(second.next(k)) for k in sizes[cut:]]
    assert got == expected and second.position == whole.position


def test_seeds_and_epochs_differ() -> None:
    one, two = ShuffledPrompts(prompts(50), 0), ShuffledPrompts(prompts(50), 1)
    first, second, other = ids(one.next(50)), ids(one.next(50)), ids(two.next(50))
    assert len({tuple(first), tuple(second), tuple(other), tuple(ids(prompts(50)))}) == 4


def test_what_would_silently_change_the_order_is_refused() -> None:
    state = ShuffledPrompts(prompts(5), 0).state_dict()
    with pytest.raises(ValueError, match=r"run.seed 0, the config says 1"):
        ShuffledPrompts(prompts(5), 1).load_state_dict(state)
    with pytest.raises(ValueError, match="training prompts differ"):
        ShuffledPrompts(prompts(6), 0).load_state_dict(state)
    with pytest.raises(ValueError, match=r"data.sources"):
        ShuffledPrompts([], 0)


def answered(prompt: Prompt, *rewards: float | None) -> Group:
    none = np.zeros(0, np.int32)
    arrays = (none, none, np.zeros(0, np.float32), none, np.zeros(0, np.bool_), none)
    made = [Trajectory(prompt, "g", i, *arrays, reward=reward) for i, reward in enumerate(rewards)]
    return Group("g", prompt, made)


def retiring(n: int = 6, rate: float | None = 0.75, per_step: int = 2, seed: int = 0) -> ShuffledPrompts:
    return ShuffledPrompts(prompts(n), seed, rate, pass_threshold=0.5, prompts_per_step=per_step)


def test_prompts_that_pass_often_enough_are_passed_over() -> None:
    sampler = retiring()
    easy, edge, hard, failed, unknown, broken = first = sampler.next(6)
    sampler.observe(
        [
            answered(easy, 1.0, 1.0, 1.0, 0.5),
            answered(edge, 1.0, 1.0, 1.0, 0.0),  # exactly 0.75
            answered(hard, 1.0, 1.0, 0.0, 0.0),
            answered(failed, 1.0, None, 0.0),  # a rate of 0.5 over the scored
            answered(unknown, None, None),
            answered(broken, float("nan"), 1.0),
        ]
    )
    assert sampler.retired == {easy.prompt_id, edge.prompt_id}
    left = set(ids(first)) - sampler.retired
    for _ in range(3):
        assert set(ids(sampler.next(4))) == left, "each epoch asks all that are left, once"


def test_the_last_group_decides() -> None:
    sampler = retiring()
    one = sampler.next(1)[0]
    sampler.observe([answered(one, 1.0, 1.0), answered(one, 0.0, 1.0)])
    assert sampler.retired == set()
    sampler.observe([answered(one, 0.0, 1.0), answered(one, 1.0, 1.0)])
    assert sampler.retired == {one.prompt_id}


def test_all_come_back_when_fewer_than_a_step_is_left() -> None:
    sampler = retiring(n=6, per_step=2)
    asked = sampler.next(5)
    sampler.observe([answered(p, 1.0) for p in asked[:4]])
    assert len(sampler.retired) == 4, "2 are left: a whole step"
    sampler.observe([answered(asked[4], 1.0)])
    assert sampler.retired == set()
    drawn = ids(sampler.next(7))
    assert len(drawn) == 7 and set(drawn[1:]) == set(ids(prompts(6)))


def test_a_step_larger_than_the_data_retires_nobody() -> None:
    sampler = retiring(n=3, per_step=8)
    sampler.observe([answered(p, 1.0) for p in sampler.next(8)])
    assert sampler.retired == set() and len(sampler.next(8)) == 8


def test_without_a_rate_nobody_retires() -> None:
    sampler = retiring(rate=None)
    sampler.observe([answered(p, 1.0) for p in sampler.next(6)])
    assert sampler.retired == set()


@settings(max_examples=40)
@given(st.integers(2, 12), st.integers(1, 5), st.lists(st.booleans(), min_size=30, max_size=30), st.integers(0, 6))
def test_resumed_with_retired_prompts_equals_uninterrupted(n: int, k: int, right: list[bool], cut: int) -> None:
    def run(sampler: ShuffledPrompts, steps: range) -> list[list[str]]:
        drawn = []
        for step in steps:
            batch = sampler.next(k)
            drawn.append(ids(batch))
            sampler.observe([answered(p, float(right[(step * k + i) % 30])) for i, p in enumerate(batch)])
        return drawn

    whole, first, second = (retiring(n, per_step=k) for _ in range(3))
    expected = run(whole, range(6))
    got = run(first, range(cut))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert got + run(second, range(cut, 6)) == expected and second.state_dict() == whole.state_dict()
