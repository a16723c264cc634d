"""REINFORCE against an independent reading of Williams (1992)."""

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

PARAMS = st.sampled_from([{}])


@settings(max_examples=40)
@given(steps(), PARAMS)
def test_values_equal_the_formula(step, params):
    """Each token's loss is −Â log π, in float64, on random ragged groups."""
    check_values("reinforce", reference.reinforce, step, **params)


@settings(max_examples=20)
@given(steps(max_groups=2, max_size=3, max_length=5), PARAMS)
def test_gradient_equals_finite_differences(step, params):
    """The gradient is the central difference of the reference, with what is under a stop-gradient held fixed."""
    check_gradient("reinforce", reference.reinforce, step, **params)


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [(1, 0.5, 1), (1, 6, 1), (-1, 0.5, -1), (-1, 6, -1)],
)
def test_weight_on_grad_log_pi(advantage, ratio, expected):
    """The weight on grad log pi is the advantage, whatever the ratio."""
    assert weight(make("reinforce"), advantage, ratio) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@settings(max_examples=30)
@given(ragged_rewards, st.integers(0, 99))
def test_advantage_is_the_papers(rewards, seed):
    """The advantage is R − mean_g; the aggregation is fixed_length."""
    check_advantage(make("reinforce").advantages, reference.centred, rewards, seed)
    assert make("reinforce").aggregation == "fixed_length"
