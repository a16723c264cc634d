"""Mixtures: shares, epochs without replacement, exact resume, and what would silently change the order."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.blocks.source import Source
from configs.blocks.supervised_data import SLData
from data_feeds.examples.examples import Example, ExampleMaker, ExampleSource, TooLongError
from data_feeds.examples.mixture import MixedExamples, largest_remainder
from data_feeds.examples.rows import ExampleRow
from records.rollout import Prompt, Trajectory

MIXTURES = ["proportional", "fixed", "per_step"]


class NumberedRows:
    """n rows {"i": index}."""

    columns = None

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def read(self, index: int) -> dict[str, Any]:
        return {"i": index}

    def where(self, index: int) -> str:
        return f"row {index + 1}"

    def all(self) -> Any:
        return (self.read(i) for i in range(self.n))


class EveryThirdTooLong(ExampleMaker):
    """Makes an example of a row's number alone; row 2 of 3 is too long when asked to be."""

    refuse = False

    def parse(self, row: dict[str, Any], source: Source, where: str) -> ExampleRow:
        return ExampleRow([], ([],), None, row)

    def make(self, row: ExampleRow, prompt_id: str, source: str, where: str) -> Example:
        if self.refuse and row.columns["i"] % 3 == 2:
            raise TooLongError(where)
        ids = np.arange(2, dtype=np.int32)
        zeros = np.zeros(2, dtype=np.float32)
        prompt = Prompt(prompt_id, [], source=source)
        return (Trajectory(prompt, prompt_id, 0, ids[:1], ids, zeros, ids, ids > 0, ids),)


class Refusing(EveryThirdTooLong):
    refuse = True


def mixed(
    sizes: list[int], mixture: str = "fixed", weights: list[float] | None = None, seed: int = 0, refuse: bool = False,
    **keys: Any,
) -> MixedExamples:  # fmt: skip
    data = SLData(sources=[Source(reasoning_gym="chain_sum")])
    maker = (Refusing if refuse else EveryThirdTooLong)(None, data, "demonstrations")
    sources = [
        ExampleSource(
            f"s{i}", Source(file=f"s{i}.jsonl", weight=w), NumberedRows(n), maker, np.arange(n, dtype=np.int64)
        )
        for i, (n, w) in enumerate(zip(sizes, weights or [1.0] * len(sizes), strict=True))
    ]
    return MixedExamples(sources, seed, mixture, **keys)


def ids(batch: list[Example]) -> list[str]:
    return [example[0].group_id for example in batch]


sizes = st.lists(st.integers(1, 15), min_size=1, max_size=4)


@settings(max_examples=40)
@given(sizes, st.sampled_from(MIXTURES), st.integers(1, 20), st.booleans(), st.integers(0, 3))
def test_every_row_comes_once_before_one_comes_again(
    sizes: list[int], mixture: str, k: int, refuse: bool, seed: int
) -> None:
    sampler = mixed(sizes, mixture, seed=seed, refuse=refuse)
    drawn = [i for _ in range(12) for i in ids(sampler.next(k))]
    assert len(drawn) == 12 * k
    groups = [drawn] if mixture == "proportional" else [[d for d in drawn if d.startswith(f"s{i}/")] for i in range(4)]
    for own in groups:
        counts = Counter(own)
        usable = sum(n - (n // 3 if refuse else 0) for n in sizes) if mixture == "proportional" else None
        for start in range(0, len(own), usable or 1):
            if usable and start + usable <= len(own):
                assert len(set(own[start : start + usable])) == usable
        assert not counts or max(counts.values()) - min(counts.values()) <= 1
    if refuse:
        assert all(int(d.split("/")[1]) % 3 != 2 for d in drawn)


@settings(max_examples=40)
@given(
    sizes,
    st.sampled_from(MIXTURES),
    st.lists(st.integers(0, 9), min_size=2, max_size=8),
    st.integers(0, 7),
    st.booleans(),
)
def test_resumed_equals_uninterrupted(sizes: list[int], mixture: str, ks: list[int], cut: int, refuse: bool) -> None:
    weights = None if mixture == "proportional" else [1.0 + i for i in range(len(sizes))]
    whole, first, second = (mixed(sizes, mixture, weights, refuse=refuse) for _ in range(3))
    expected = [ids(whole.next(k)) for k in ks]
    got = [ids(first.next(k)) for k in ks[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    got += [ids(second.next(k)) for k in ks[cut:]]
    assert got == expected and second.state_dict() == whole.state_dict()
    assert ids(second.next(1)) == ids(whole.next(1))
    assert second.metrics() == whole.metrics(), "what was left out is counted once, before or after"


def per_source(sampler: MixedExamples, k: int) -> list[int]:
    counts = Counter(i.split("/")[0] for i in ids(sampler.next(k)))
    return [counts[s.name] for s in sampler.sources]


def test_fixed_shares_are_in_every_batch() -> None:
    sampler = mixed([5, 50, 500], weights=[1, 2, 5])
    assert all(per_source(sampler, 16) == [2, 4, 10] for _ in range(30))
    sampler.next(16)
    assert {name: v for name, v in sampler.metrics().items() if "/s0" in name} == {
        "share/s0": 0.125,
        "examples/s0": 62.0,
        "tokens/s0": 186.0,
        "epoch/s0": 62 / 5,
        "left_out/s0": 0.0,
    }


@settings(max_examples=60)
@given(st.lists(st.floats(0.05, 5), min_size=1, max_size=5), st.integers(1, 33))
def test_what_rounding_leaves_over_is_carried(weights: list[float], k: int) -> None:
    sampler = mixed([7] * len(weights), weights=weights)
    shares = np.asarray(weights) / sum(weights)
    for batch in range(1, 25):
        counts = np.asarray(per_source(sampler, k))
        assert counts.sum() == k and (np.abs(counts - shares * k) < 1).all()
        assert (sampler.drawn - shares * k * batch < 1 + 1e-6).all()
    assert (np.abs(sampler.drawn - shares * k * 24) < 2.5).all(), "shares hold over the run, not just per batch"


def test_proportional_follows_the_sizes() -> None:
    sampler = mixed([10, 90], "proportional")
    assert per_source(sampler, 100) == [10, 90]


def test_shares_of_a_step_are_a_function_of_seed_and_step() -> None:
    one, two, other = (mixed([9, 9, 9], "per_step", [1, 1, 2], seed=s) for s in (0, 0, 1))
    first = [per_source(one, 20) for _ in range(200)]
    for _ in range(3):
        two.next(7)  # another batch size before
    assert [per_source(two, 20) for _ in range(197)] == first[3:]
    assert [per_source(other, 20) for _ in range(5)] != first[:5]
    assert len({tuple(c) for c in first}) > 50, "re-drawn"
    assert np.mean(first, 0) / 20 == pytest.approx([0.25, 0.25, 0.5], abs=0.03)
    steady = mixed([9, 9, 9], "per_step", [1, 1, 2], concentration=1e6)
    assert all(per_source(steady, 20) == [5, 5, 10] for _ in range(5))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6).filter(lambda x: sum(x) > 0), st.integers(0, 50))
def test_largest_remainder_is_within_one_of_its_quota(raw: list[float], k: int) -> None:
    quotas = np.asarray(raw) / sum(raw) * k
    counts = largest_remainder(quotas, k, quotas)
    assert counts.sum() == k and (counts >= 0).all() and (np.abs(counts - quotas) < 1 + 1e-6).all()


def test_epochs_and_seeds_differ_and_order_can_be_kept() -> None:
    one, two = mixed([50], seed=0), mixed([50], seed=1)
    first, again, other = ids(one.next(50)), ids(one.next(50)), ids(two.next(50))
    plain = mixed([50], shuffle=False)
    in_order = ids(plain.next(50))
    assert in_order == [f"s0/{i}" for i in range(50)] == ids(plain.next(50))
    assert len({tuple(first), tuple(again), tuple(other), tuple(in_order)}) == 4


def test_what_would_silently_change_the_order_is_refused() -> None:
    state = mixed([5, 6]).state_dict()
    with pytest.raises(ValueError, match=r"run\.seed 0, the config says 1"):
        mixed([5, 6], seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match=r"data\.mixture fixed, the config says per_step"):
        mixed([5, 6], "per_step").load_state_dict(state)
    for other in (mixed([5, 7]), mixed([5, 6], weights=[1, 2]), mixed([5])):
        with pytest.raises(ValueError, match="the training rows or their weights differ"):
            other.load_state_dict(state)


def test_sources_that_hold_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.sources: the training set is empty"):
        mixed([0])
    with pytest.raises(ValueError, match="'s1' has no row left to learn from"):
        mixed([3, 0])


def test_weights_that_mean_nothing_are_refused() -> None:
    files = [{"file": "a.jsonl", "weight": 2.0}, {"file": "b.jsonl"}]
    with pytest.raises(ValueError, match="'weight' has no effect with mixture: proportional; use mixture: fixed"):
        SLData(sources=files)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'weight' has no effect on held-out sources"):
        SLData(sources=files, mixture="fixed", heldout_sources=files)  # type: ignore[arg-type]
