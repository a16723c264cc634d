"""IPO against an independent reading of arXiv 2310.12036."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unit_tests.algs import reference
from unit_tests.algs.method_checks import (
    check_gradient,
    check_values,
    gradient,
    make,
    pair_steps,
    policy_tokens,
    random_pairs,
)

PARAMS = st.sampled_from([{}, {"tau": 0.5}, {"length_normalized": False, "tau": 1.0}])


@settings(max_examples=40)
@given(pair_steps(), PARAMS)
def test_values_equal_the_formula(step, params):
    """Each pair's loss is (h − 1/(2τ))², h the difference of mean (or, as asked, summed) log-ratios, in float64."""
    check_values("ipo", reference.ipo, step, **params)


@settings(max_examples=15)
@given(pair_steps(max_pairs=2, max_length=5), PARAMS)
def test_gradient_equals_finite_differences(step, params):
    """The gradient is the central difference of the reference."""
    check_gradient("ipo", reference.ipo, step, **params)


@pytest.mark.parametrize("tau", [0.1, 0.5, 2.0])
def test_the_minimum_is_at_margin_1_over_2_tau(tau):
    """At h = 1/(2τ) loss and gradient are 0; below it the chosen response is raised, beyond it is pulled back."""
    step = random_pairs([3, 2], np.random.default_rng(0))
    w = step.chosen.index(True)
    here = np.array(list(step.slices[w]))
    for distance in (-0.5, 0.0, 0.5):
        ref = step.logp.copy()
        ref[here] -= 1 / (2 * tau) + distance
        method, at = make("ipo", tau=tau), dataclasses.replace(step, ref=ref)
        answer = method.loss(policy_tokens(at, method))
        assert answer.loss.tolist() == pytest.approx([distance**2] * 5, abs=1e-5)
        assert answer.metrics["margin"].item() == pytest.approx(0.5 + tau * distance, abs=1e-5)
        slope = gradient(method, at)[here]
        assert np.abs(slope).max() < 1e-5 if distance == 0 else (slope * distance > 0).all()
