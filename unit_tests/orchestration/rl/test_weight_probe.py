"""Engine and trainer must agree on the same tokens; anything else stops the run with a reason."""

from __future__ import annotations

import numpy as np
import pytest

from configs.blocks.rl import Sync
from orchestration.rl.weight_probe import TOLERANCE_BY_DTYPE, ProbeFailed, compare, probe_tokens
from records.rollout import Prompt, Trajectory


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_gaps_are_over_tokens_not_over_sequences() -> None:
    gaps = compare([floats(-1, -2, -3), floats(-1)], [floats(-1, -2, -3.4), floats(-1.2)], tolerance=1).means()
    assert gaps["sync/probe_gap_mean"] == pytest.approx((0.4 + 0.2) / 4, rel=1e-6)
    assert gaps["sync/probe_gap_max"] == pytest.approx(0.4, rel=1e-6)


def test_gaps_of_both_signs_do_not_cancel() -> None:
    with pytest.raises(ProbeFailed):
        compare([floats(-1, -2)], [floats(-1.5, -1.5)], tolerance=0.1)


def test_empty_sequences_count_for_nothing() -> None:
    gaps = compare([floats(), floats(-1)], [floats(), floats(-1.05)], tolerance=0.1).means()
    assert gaps["sync/probe_gap_mean"] == pytest.approx(0.05, rel=1e-5)


def test_failure_says_what_was_compared_and_how_far_off_it_is() -> None:
    with pytest.raises(ProbeFailed) as failure:
        compare([floats(-1, -2), floats(-1)], [floats(-1, -2), floats(-1.9)], tolerance=0.15)
    message = str(failure.value)
    assert "3 tokens" in message and "mean gap 0.3 nats (largest 0.9)" in message
    assert "allowed 0.15 (sync.probe_tolerance)" in message
    assert "Per sequence: 0, 0.9" in message


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_never_passes(bad: float) -> None:
    with pytest.raises(ProbeFailed, match=r"1 of 2 .* of the engine are not finite"):
        compare([floats(-1, bad)], [floats(-1, bad)], tolerance=1e9)
    with pytest.raises(ProbeFailed, match=r"1 of 2 .* of the trainer are not finite"):
        compare([floats(-1, -2)], [floats(bad, -2)], tolerance=1e9)


def test_other_sequences_than_asked_about_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="not the same sequences"):
        compare([floats(-1, -2)], [floats(-1)], tolerance=1)
    with pytest.raises(AssertionError, match="proves nothing"):
        compare([floats()], [floats()], tolerance=1)


def test_default_tolerances_are_the_documented_ones() -> None:
    described = Sync.model_fields["probe_tolerance"].description
    assert described is not None
    for dtype, tolerance in TOLERANCE_BY_DTYPE.items():
        assert f"{tolerance:g} in {dtype}" in described


def trajectory(group: str, prompt: int, actions: list[bool]) -> Trajectory:
    length = len(actions)
    return Trajectory(
        Prompt(group, []), group, 0, np.arange(100, 100 + prompt, dtype=np.int32),
        token_ids=np.arange(length, dtype=np.int32), behavior_logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32), is_action=np.asarray(actions, np.bool_), turn=np.zeros(length, np.int32),
    )  # fmt: skip


def test_groups_differ_and_an_observation_ends_the_tokens() -> None:
    made = [
        trajectory("a", 5, [True] * 6),
        trajectory("a", 5, [True] * 6),
        trajectory("b", 5, [True, True, False, True]),
        trajectory("c", 5, []),
        trajectory("d", 5, [True]),
    ]
    chosen = probe_tokens(made, count=4, tokens=4, longest=100)
    assert sorted(t.group_id for t in chosen) == ["a", "b", "d"], "one of a group, and none without tokens"
    assert {t.group_id: t.token_ids.tolist() for t in chosen} == {"a": [0, 1, 2, 3], "b": [0, 1], "d": [0]}
    assert len(probe_tokens(made, count=2, tokens=4, longest=100)) == 2


@pytest.mark.parametrize(("longest", "prompt"), [(7, [100, 101, 102, 103, 104]), (6, [101, 102, 103, 104]), (3, [104])])
def test_what_an_engine_could_not_hold_loses_its_beginning(longest: int, prompt: list[int]) -> None:
    (cut,) = probe_tokens([trajectory("a", 5, [True] * 2)], count=1, tokens=8, longest=longest)
    assert cut.prompt_ids.tolist() == prompt
    assert cut.token_ids.tolist() == [0, 1]
