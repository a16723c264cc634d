"""The ScaleRL recipe's loss and advantage against an independent reading of arXiv 2510.13786."""

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

PARAMS = st.sampled_from([{}, {"ratio_cap": 1.5}])


@settings(max_examples=40)
@given(steps(), PARAMS)
def test_values_equal_the_formula(step, params):
    """Each token's loss is −sg(min(r, cap))·Â·log π, in float64, on random ragged groups."""
    check_values("scale_rl", reference.scale_rl, step, **params)


@settings(max_examples=20)
@given(steps(max_groups=2, max_size=3, max_length=5), PARAMS)
def test_gradient_equals_finite_differences(step, params):
    """The gradient is the central difference of the reference, with what is under a stop-gradient held fixed."""
    check_gradient("scale_rl", reference.scale_rl, step, **params)


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [(1, 0.5, 0.5), (1, 4.9, 4.9), (1, 6, 5), (-1, 0.01, -0.01), (-1, 6, -5)],
)
def test_weight_on_grad_log_pi(advantage, ratio, expected):
    """The weight on grad log pi is min(r, cap)·Â: past the cap it stays at the cap."""
    assert weight(make("scale_rl"), advantage, ratio) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@settings(max_examples=30)
@given(ragged_rewards, st.integers(0, 99))
def test_advantage_is_the_papers(rewards, seed):
    """The advantage is (R − mean_g)/std of all R − mean_g of the step; the aggregation is prompt_mean."""
    check_advantage(make("scale_rl").advantages, reference.scale_rl_advantage, rewards, seed)
    assert make("scale_rl").aggregation == "prompt_mean"
