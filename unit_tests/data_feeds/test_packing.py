"""What packing must keep: every action token once, the budget, equal numbers of micro-batches, and what each query sees."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_feeds.packing import DUMMY, MicroBatch, Segment, pack
from data_feeds.responses import Responses
from records.rollout import Prompt, Trajectory

VERSION = 9


def trajectory(group: int, sample: int, prompt_ids: list[int], tokens: list[tuple[int, bool]]) -> Trajectory:
    length = len(tokens)
    return Trajectory(
        prompt=Prompt(f"p{group}", []),
        group_id=f"g{group}",
        sample=sample,
        prompt_ids=np.asarray(prompt_ids, dtype=np.int32),
        token_ids=np.asarray([token for token, _ in tokens], dtype=np.int32),
        behavior_logprobs=-np.arange(length, dtype=np.float32) - sample,
        versions=(VERSION - np.arange(length) % 3).astype(np.int32),
        is_action=np.asarray([action for _, action in tokens], dtype=bool),
        turn=np.zeros(length, dtype=np.int32),
    )


# Few token values, so that equal and nested responses are common.
RESPONSE = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([True, True, True, False])), max_size=9)
PROMPT = st.lists(st.integers(10, 99), min_size=1, max_size=7)
STEP = st.lists(st.tuples(PROMPT, st.lists(RESPONSE, max_size=6)), max_size=6)


def build(step: list[tuple[list[int], list[list[tuple[int, bool]]]]]) -> list[Trajectory]:
    return [
        trajectory(g, s, prompt, tokens) for g, (prompt, group) in enumerate(step) for s, tokens in enumerate(group)
    ]


def packed(trajectories: list[Trajectory], max_tokens: int, ranks: int, share: bool) -> list[list[MicroBatch]]:
    count = len(trajectories)
    groups = np.asarray([int(t.group_id[1:]) for t in trajectories], dtype=np.int64)
    responses = Responses(trajectories)
    columns = responses.columns(VERSION, advantages=np.arange(count) + 0.5)
    return pack(responses, groups, 1.0 / (np.arange(count) + 1), columns, max_tokens, ranks, share)


def visible(batch: MicroBatch, position: int) -> list[int]:
    """Token ids that the query at `position` sees, by the layout's rules, in the order of their positions."""
    (s,) = [s for s in batch.segments if s.start <= position < s.start + s.length]
    seen = [*range(s.prefix_start, s.prefix_start + s.prefix_length), *range(s.start, position + 1)]
    assert batch.position_ids[seen].tolist() == list(range(len(seen)))
    return batch.input_ids[seen].tolist()


@settings(max_examples=150)
@given(step=STEP, max_tokens=st.integers(1, 60), ranks=st.integers(1, 4), share=st.booleans())
@example(step=[([1], [[(1, True)]])], max_tokens=1, ranks=3, share=True)
def test_packing_keeps_every_action_token(step, max_tokens: int, ranks: int, share: bool) -> None:
    trajectories = build(step)
    per_rank = packed(trajectories, max_tokens, ranks, share)
    assert len(per_rank) == ranks
    assert len({len(batches) for batches in per_rank}) == 1
    assert all(any(not batch.is_dummy for batch in batches) for batches in zip(*per_rank, strict=True))
    seen: Counter[int] = Counter()
    total_weight = 0.0
    for batch in (batch for batches in per_rank for batch in batches):
        total_weight += float(batch.loss_weights.astype(np.float64).sum())
        if batch.is_dummy:
            assert batch.loss_weights.tolist() == [0.0] and batch.tokens == 1
            continue
        ends = [s.start + s.length for s in batch.segments]
        assert [s.start for s in batch.segments] == [0, *ends[:-1]] and ends[-1] == batch.tokens
        assert all(s.length > 0 for s in batch.segments)
        sequences = len(batch.trajectory_index)
        assert batch.tokens <= max_tokens or sequences == 1 or len(set(batch.group)) == 1
        assert batch.sequence.tolist() == sorted(batch.sequence) and set(batch.sequence) == set(range(sequences))
        for s, index in enumerate(batch.trajectory_index.tolist()):
            seen[index] += 1
            t = trajectories[index]
            own = batch.sequence == s
            actions = np.flatnonzero(t.is_action)
            assert batch.targets[own].tolist() == t.token_ids[actions].tolist()
            assert batch.columns["behavior_logprobs"][own].tolist() == t.behavior_logprobs[actions].tolist()
            assert batch.columns["staleness"][own].tolist() == (VERSION - t.versions[actions]).tolist()
            assert set(batch.columns["advantages"][own].tolist()) == {index + 0.5}
            assert batch.group[s] == int(t.group_id[1:])
            everything = [*t.prompt_ids.tolist(), *t.token_ids.tolist()]
            for action, position in zip(actions.tolist(), batch.predict[own].tolist(), strict=True):
                assert visible(batch, position) == everything[: len(t.prompt_ids) + action]
    trained = {i for i, t in enumerate(trajectories) if t.action_tokens}
    assert dict(seen) == dict.fromkeys(trained, 1)
    expected = sum(t.action_tokens / (i + 1) for i, t in enumerate(trajectories))
    assert total_weight == pytest.approx(expected, rel=1e-5)


@settings(max_examples=50)
@given(step=STEP, max_tokens=st.integers(1, 60), ranks=st.integers(1, 3), share=st.booleans())
def test_the_budget_holds_unless_one_trajectory_exceeds_it(step, max_tokens: int, ranks: int, share: bool) -> None:
    trajectories = build(step)
    for batch in (b for batches in packed(trajectories, max_tokens, ranks, share) for b in batches if not b.is_dummy):
        if batch.tokens > max_tokens:
            longest = max(
                len(trajectories[i].prompt_ids) + int(np.flatnonzero(trajectories[i].is_action)[-1])
                for i in batch.trajectory_index
            )
            assert batch.tokens == longest  # one trajectory, with whatever is nested in it


@settings(max_examples=25)
@given(step=STEP, share=st.booleans())
def test_packing_is_deterministic(step, share: bool) -> None:
    first, second = (pickle.dumps(packed(build(step), 30, 2, share)) for _ in range(2))
    assert first == second


def test_a_shared_prompt_is_computed_once() -> None:
    prompt = list(range(10, 50))
    distinct = [[(s, True), (1, True), (2, True)] for s in range(8)]
    ((batch,),) = packed([trajectory(0, s, prompt, r) for s, r in enumerate(distinct)], 1000, 1, True)
    assert batch.tokens == 40 + 8 * 2
    assert batch.segments[0] == Segment(0, 40)
    assert all(s.length == 2 and (s.prefix_start, s.prefix_length) == (0, 40) for s in batch.segments[1:])
    assert Counter(batch.predict.tolist())[39] == 8  # every first action token


def test_equal_and_nested_responses_share_positions() -> None:
    responses = [[(5, True), (6, True), (7, True)], [(5, True), (6, True), (8, True)], [(5, True), (9, True)]]
    ((batch,),) = packed([trajectory(0, s, [1, 2], r) for s, r in enumerate(responses)], 100, 1, True)
    assert batch.input_ids.tolist() == [1, 2, 5, 6]
    assert batch.predict.tolist() == [1, 2, 3, 1, 2, 3, 1, 2]


def test_a_group_too_big_for_the_budget_repeats_its_prompt() -> None:
    responses = [[(s, True)] * 11 for s in range(6)]
    (batches,) = packed([trajectory(0, s, list(range(20, 40)), r) for s, r in enumerate(responses)], 40, 1, True)
    assert [batch.tokens for batch in batches] == [40, 40, 40]
    assert all(batch.segments[0] == Segment(0, 20) for batch in batches)


def test_ranks_carry_about_the_same() -> None:
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(5, 0.8, size=200)).astype(int) + 1
    made = [trajectory(i, 0, [1], [(1, True)] * int(length)) for i, length in enumerate(lengths)]
    per_rank = packed(made, 4096, 4, False)
    loads = [sum(batch.tokens for batch in batches) for batches in per_rank]
    assert max(loads) <= 1.02 * min(loads)
    assert len(per_rank[0]) <= -(-sum(loads) // (4 * 4096)) + 1
    assert not any(batch.is_dummy for batches in per_rank for batch in batches)


def test_too_few_trajectories_for_the_ranks_are_made_up_by_dummies() -> None:
    per_rank = packed([trajectory(0, 0, [4, 5], [(1, True), (2, True)])], 100, 3, True)
    assert [len(batches) for batches in per_rank] == [1, 1, 1]
    dummies = [batch for batches in per_rank for batch in batches if batch.is_dummy]
    assert len(dummies) == 2
    assert all(d.trajectory_index.tolist() == [DUMMY] and d.loss_weights.sum() == 0 for d in dummies)


def test_nothing_to_train_on_gives_no_micro_batches() -> None:
    assert packed([], 100, 2, True) == [[], []]
    assert packed([trajectory(0, 0, [1], [(2, False)])], 100, 2, True) == [[], []]


def test_bad_input_is_refused() -> None:
    one = trajectory(0, 0, [1], [(2, True)])
    with pytest.raises(ValueError, match="no tokens to predict from"):
        packed([trajectory(0, 0, [], [(2, True)])], 100, 1, False)
    with pytest.raises(ValueError, match="differ in prompt"):
        packed([one, trajectory(0, 1, [3], [(2, True)])], 100, 1, True)
    with pytest.raises(ValueError, match="one entry per trajectory"):
        pack(Responses([one]), np.zeros(2, dtype=int), np.ones(1), {}, 10, 1, True)
    with pytest.raises(ValueError, match="x: a column needs one entry per action token"):
        pack(Responses([one]), np.zeros(1, dtype=int), np.ones(1), {"x": np.zeros(2)}, 10, 1, True)
    with pytest.raises(ValueError, match="at least 1"):
        packed([one], 0, 1, True)
