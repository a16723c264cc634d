"""GRPO against an independent reading of arXiv 2402.03300."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unit_tests.algs import reference
from unit_tests.algs.method_checks import (
    check_advantage,
    check_gradient,
    check_values,
    gradient,
    make,
    policy_tokens,
    ragged_rewards,
    steps,
    weight,
)

PARAMS = st.sampled_from([{}, {"clip_low": 0.2, "clip_high": 0.28}, {"clip_low": 0.9, "clip_high": 5.0}])


@settings(max_examples=40)
@given(steps(), PARAMS)
def test_values_equal_the_formula(step, params):
    """Each token's loss is −min(rÂ, clip(r, 1−ε_l, 1+ε_h)Â), in float64, on random ragged groups."""
    check_values("grpo", reference.grpo, step, **params)


@settings(max_examples=20)
@given(steps(max_groups=2, max_size=3, max_length=5), PARAMS)
def test_gradient_equals_finite_differences(step, params):
    """The gradient is the central difference of the reference, with what is under a stop-gradient held fixed."""
    check_gradient("grpo", reference.grpo, step, **params)


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [(1, 0.5, 0.5), (1, 1.19, 1.19), (1, 6, 0), (-1, 0.5, 0), (-1, 0.81, -0.81), (-1, 6, -6)],
)
def test_weight_on_grad_log_pi(advantage, ratio, expected):
    """The weight on grad log pi is rÂ inside the clip range and 0 where a clip binds."""
    assert weight(make("grpo"), advantage, ratio) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@settings(max_examples=30)
@given(ragged_rewards, st.integers(0, 99))
def test_advantage_is_the_papers(rewards, seed):
    """The advantage is (R − mean_g)/(std_g + 1e-6), 0 where the group's rewards are equal; the aggregation is sequence_mean."""
    check_advantage(make("grpo").advantages, reference.group_zscore, rewards, seed)
    assert make("grpo").aggregation == "sequence_mean"


@settings(max_examples=20)
@given(steps())
def test_clip_fraction_counts_tokens_without_gradient(step):
    """The metric clip_fraction marks exactly the tokens with an advantage whose gradient the clip has taken."""
    method = make("grpo")
    marked = method.loss(policy_tokens(step, method)).metrics["clip_fraction"].bool().numpy()
    silent = (gradient(method, step) == 0) & (step.advantage != 0)
    assert (marked[step.advantage != 0] == silent[step.advantage != 0]).all()
