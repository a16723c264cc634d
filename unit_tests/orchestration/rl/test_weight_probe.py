"""Engine and trainer must agree on the same tokens; anything else stops the run with a reason."""

from __future__ import annotations

import numpy as np
import pytest

from configs.blocks.rl import Sync
from orchestration.rl.weight_probe import TOLERANCE_BY_DTYPE, ProbeFailed, compare


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_gaps_are_over_tokens_not_over_sequences() -> None:
    result = compare([floats(-1, -2, -3), floats(-1)], [floats(-1, -2, -3.4), floats(-1.2)], tolerance=1)
    assert result.mean_gap == pytest.approx((0.4 + 0.2) / 4, rel=1e-6)
    assert result.max_gap == pytest.approx(0.4, rel=1e-6)
    assert result.tokens == 4


def test_gaps_of_both_signs_do_not_cancel() -> None:
    with pytest.raises(ProbeFailed):
        compare([floats(-1, -2)], [floats(-1.5, -1.5)], tolerance=0.1)


def test_empty_sequences_count_for_nothing() -> None:
    assert compare([floats(), floats(-1)], [floats(), floats(-1)], tolerance=0.1).tokens == 1


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
