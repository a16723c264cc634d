"""Soft adaptive clipping against an independent reading of arXiv 2511.20347."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unit_tests.algs import reference
from unit_tests.algs.method_checks import (
    check_advantage,
    check_gradient,
    check_values,
    make,
    ragged_rewards,
    steps,
    weight,
)

PARAMS = st.sampled_from([{}, {"tau_positive": 3.0, "tau_negative": 0.5}])


@settings(max_examples=40)
@given(steps(), PARAMS)
def test_values_equal_the_formula(step, params):
    """Each token's loss is −(4/τ)σ(τ(r−1))·Â, in float64, on random ragged groups."""
    check_values("sapo", reference.sapo, step, **params)


@settings(max_examples=20)
@given(steps(max_groups=2, max_size=3, max_length=5), PARAMS)
def test_gradient_equals_finite_differences(step, params):
    """The gradient is the central difference of the reference, with what is under a stop-gradient held fixed."""
    check_gradient("sapo", reference.sapo, step, **params)


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [(1, 0.5, 0.470007), (1, 1, 1.0), (1, 6, 0.159553), (-1, 0.5, -0.46707), (-1, 1, -1.0), (-1, 6, -0.124629)],
)
def test_weight_on_grad_log_pi(advantage, ratio, expected):
    """The weight on grad log pi is 4σ(1−σ)rÂ: open at r = 1, fading on both sides."""
    assert weight(make("sapo"), advantage, ratio) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@settings(max_examples=30)
@given(ragged_rewards, st.integers(0, 99))
def test_advantage_is_the_papers(rewards, seed):
    """The advantage is (R − mean_g)/(std_g + 1e-6), 0 where the group's rewards are equal; the aggregation is sequence_mean."""
    check_advantage(make("sapo").advantages, reference.group_zscore, rewards, seed)
    assert make("sapo").aggregation == "sequence_mean"
