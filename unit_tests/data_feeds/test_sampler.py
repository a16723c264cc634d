"""The order in which prompts are asked."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_feeds.sampler import PromptSampler, ShuffledPrompts
from rollouts.records import Prompt


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
    assert got == expected and second.epoch == whole.epoch


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
