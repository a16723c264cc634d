"""REINFORCE++-baseline against an independent reading of arXiv 2501.03262."""

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

PARAMS = st.sampled_from([{}, {"clip_low": 0.1, "clip_high": 0.3}])


@settings(max_examples=40)
@given(steps(), PARAMS)
def test_values_equal_the_formula(step, params):
    """Each token's loss is PPO's clipped surrogate, in float64, on random ragged groups."""
    check_values("reinforce_plus_plus_baseline", reference.grpo, step, **params)


@settings(max_examples=20)
@given(steps(max_groups=2, max_size=3, max_length=5), PARAMS)
def test_gradient_equals_finite_differences(step, params):
    """The gradient is the central difference of the reference, with what is under a stop-gradient held fixed."""
    check_gradient("reinforce_plus_plus_baseline", reference.grpo, step, **params)


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [(1, 0.5, 0.5), (1, 1.19, 1.19), (1, 6, 0), (-1, 0.5, 0), (-1, 0.81, -0.81), (-1, 6, -6)],
)
def test_weight_on_grad_log_pi(advantage, ratio, expected):
    """The weight on grad log pi is rÂ inside the clip range and 0 where a clip binds."""
    assert weight(make("reinforce_plus_plus_baseline"), advantage, ratio) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@settings(max_examples=30)
@given(ragged_rewards, st.integers(0, 99))
def test_advantage_is_the_papers(rewards, seed):
    """The advantage is R less its group's mean, normalised over the step's responses; the aggregation is token_mean."""
    check_advantage(
        make("reinforce_plus_plus_baseline").advantages, reference.reinforce_plus_plus_baseline, rewards, seed
    )
    assert make("reinforce_plus_plus_baseline").aggregation == "token_mean"
