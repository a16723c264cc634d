"""CISPO against an independent reading of arXiv 2506.13585."""

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

PARAMS = st.sampled_from([{}, {"ratio_cap": 1.28}, {"ratio_cap": 3.0, "ratio_floor": 0.7}])


@settings(max_examples=40)
@given(steps(), PARAMS)
def test_values_equal_the_formula(step, params):
    """Each token's loss is −sg(min(r, cap))·Â·log π, in float64, on random ragged groups."""
    check_values("cispo", reference.cispo, step, **params)


@settings(max_examples=20)
@given(steps(max_groups=2, max_size=3, max_length=5), PARAMS)
def test_gradient_equals_finite_differences(step, params):
    """The gradient is the central difference of the reference, with what is under a stop-gradient held fixed."""
    check_gradient("cispo", reference.cispo, step, **params)


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [(1, 0.5, 0.5), (1, 4.9, 4.9), (1, 6, 5), (-1, 0.01, -0.01), (-1, 6, -5)],
)
def test_weight_on_grad_log_pi(advantage, ratio, expected):
    """The weight on grad log pi is min(r, cap)·Â: past the cap it stays at the cap."""
    assert weight(make("cispo"), advantage, ratio) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@settings(max_examples=30)
@given(ragged_rewards, st.integers(0, 99))
def test_advantage_is_the_papers(rewards, seed):
    """The advantage is (R − mean_g)/(std_g + 1e-6), 0 where the group's rewards are equal; the aggregation is token_mean."""
    check_advantage(make("cispo").advantages, reference.group_zscore, rewards, seed)
    assert make("cispo").aggregation == "token_mean"


def test_floor_holds_a_small_ratio_up():
    """With ratio_floor 0.5, a token of ratio 0.1 keeps the weight 0.5."""
    assert weight(make("cispo", ratio_floor=0.5), 1, 0.1) == pytest.approx(0.5)


def test_a_floor_above_the_cap_is_refused():
    """Params that cannot both hold are refused with the way out."""
    with pytest.raises(ValueError, match="ratio_floor"):
        make("cispo", ratio_floor=6.0)
