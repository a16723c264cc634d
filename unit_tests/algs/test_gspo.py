"""GSPO, on the sequence and on the token, against an independent reading of arXiv 2507.18071."""

import numpy as np
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
    random_step,
    steps,
    weight,
)

PARAMS = st.sampled_from(
    [{}, {"level": "token"}, {"clip_low": 0.2, "clip_high": 0.3}, {"clip_low": 0.2, "clip_high": 0.3, "level": "token"}]
)


@settings(max_examples=40)
@given(steps(), PARAMS)
def test_values_equal_the_formula(step, params):
    """Each token's loss is the surrogate of s = exp(mean(log π − log π_old)), or of sg(s)·π/sg(π), in float64, on random ragged groups."""
    check_values("gspo", reference.gspo, step, **params)


@settings(max_examples=20)
@given(steps(max_groups=2, max_size=3, max_length=5), PARAMS)
def test_gradient_equals_finite_differences(step, params):
    """The gradient is the central difference of the reference, with what is under a stop-gradient held fixed."""
    check_gradient("gspo", reference.gspo, step, **params)


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [(1, 0.5, 0.5), (1, 1.0003, 1.0003), (1, 1.0005, 0), (-1, 0.9996, 0), (-1, 0.9998, -0.9998), (-1, 6, -6)],
)
def test_weight_on_grad_log_pi(advantage, ratio, expected):
    """The weight on grad log pi is sÂ inside the clip range and 0 where a clip binds."""
    assert weight(make("gspo"), advantage, ratio) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@settings(max_examples=30)
@given(ragged_rewards, st.integers(0, 99))
def test_advantage_is_the_papers(rewards, seed):
    """The advantage is (R − mean_g)/(std_g + 1e-6), 0 where the group's rewards are equal; the aggregation is sequence_mean."""
    check_advantage(make("gspo").advantages, reference.group_zscore, rewards, seed)
    assert make("gspo").aggregation == "sequence_mean"


def test_both_levels_have_one_value():
    """The token level has the sequence level's loss values; only its gradient is put on the tokens differently."""
    step = random_step([3, 2], [4, 1, 7, 2, 5], np.random.default_rng(1), by_token=True)
    sequence, token = (make("gspo", level=level) for level in ("sequence", "token"))
    values = [m.loss(policy_tokens(step, m)).loss.detach().numpy() for m in (sequence, token)]
    np.testing.assert_allclose(*values, rtol=1e-6)
    assert not np.allclose(gradient(sequence, step), gradient(token, step))


def test_with_one_advantage_per_response_both_levels_have_one_gradient():
    """With one advantage for the whole response the two levels agree in the gradient of the response's mean too."""
    step = random_step([3, 2], [4, 1, 7, 2, 5], np.random.default_rng(1))
    np.testing.assert_allclose(
        gradient(make("gspo", level="sequence"), step),
        gradient(make("gspo", level="token"), step),
        rtol=1e-4,
        atol=1e-6,
    )
