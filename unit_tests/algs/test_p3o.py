"""P3O's language-model form against an independent reading of arXiv 2605.12380."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unit_tests.algs import reference
from unit_tests.algs.method_checks import (
    check_advantage,
    check_gradient,
    check_values,
    make,
    policy_tokens,
    ragged_rewards,
    random_step,
    steps,
    weight,
)

PARAMS = st.sampled_from([{}, {"kl_direction": "forward"}])


@settings(max_examples=40)
@given(steps(), PARAMS)
def test_values_equal_the_formula(step, params):
    """Each token's loss is −sg(min(ρ, ESS))·Â·log π + (1 − ESS)·KL term, in float64, on random ragged groups."""
    check_values("p3o", reference.p3o, step, **params)


@settings(max_examples=20)
@given(steps(max_groups=2, max_size=3, max_length=5), PARAMS)
def test_gradient_equals_finite_differences(step, params):
    """The gradient is the central difference of the reference, with what is under a stop-gradient held fixed."""
    check_gradient("p3o", reference.p3o, step, **params)


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [(1, 0.5, 0.5), (1, 6, 1), (-1, 0.5, -0.5), (-1, 6, -1)],
)
def test_weight_on_grad_log_pi(advantage, ratio, expected):
    """The weight on grad log pi is min(ρ, ESS)·Â, here with one token, for which ESS = 1."""
    assert weight(make("p3o"), advantage, ratio) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@settings(max_examples=30)
@given(ragged_rewards, st.integers(0, 99))
def test_advantage_is_the_papers(rewards, seed):
    """The advantage is (R − mean_g)/(std_g + 1e-6), 0 where the group's rewards are equal; the aggregation is token_mean."""
    check_advantage(make("p3o").advantages, reference.group_zscore, rewards, seed)
    assert make("p3o").aggregation == "token_mean"


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_kl_term_keeps_its_precision_next_to_mu(direction):
    """Near ρ = 1 the KL term is ½(log ρ)² and not a multiple of float32's rounding of ρ, which may be negative."""
    method = make("p3o", kl_direction=direction)
    log_rho = torch.tensor([-2e-3, -1e-3, -1e-4, 0.0, 1e-5, 1e-4, 1e-3, 2e-3])
    t = policy_tokens(random_step([8], [1] * 8, np.random.default_rng(0)), method)
    t = dataclasses.replace(t, logprobs=log_rho, behavior_logprobs=torch.zeros(8))
    found = method.loss(t).metrics["kl_behavior"]
    np.testing.assert_allclose(found, log_rho.square() / 2, rtol=5e-3, atol=2e-11)
