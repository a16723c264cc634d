"""The KL estimators: values from their definitions, and what their gradients are in expectation, taken exactly."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algs.parts import kl

PI = np.array([0.3, -1.0, 0.7, 1.5, -0.4])  # logits of a vocabulary of five
REF = np.log(np.array([0.4, 0.1, 0.25, 0.05, 0.2]))


def on_policy(name):
    """Expectation of the estimator over tokens sampled from pi, and of its gradient in pi's logits; float64."""
    logits, log_ref = torch.tensor(PI, requires_grad=True), torch.tensor(REF)
    log_pi = torch.log_softmax(logits, 0)
    terms = log_pi.detach().exp() * kl.estimate(name, log_pi, log_ref)
    return terms.sum().item(), torch.autograd.grad(terms.sum(), logits)[0].numpy()


def divergence(forward):
    """KL(pi || ref), or with `forward` KL(ref || pi), and its gradient in pi's logits."""
    logits, log_ref = torch.tensor(PI, requires_grad=True), torch.tensor(REF)
    log_pi = torch.log_softmax(logits, 0)
    one, other = (log_ref, log_pi) if forward else (log_pi, log_ref)
    value = (one.exp() * (one - other)).sum()
    return value.item(), torch.autograd.grad(value, logits)[0].numpy()


@settings(max_examples=50)
@given(st.floats(-8, 8, width=32), st.floats(-8, 8, width=32))
def test_values_and_slopes_equal_the_definitions(logp, ref):
    """k1 = d, k2 = d²/2, k3 = e^−d − 1 + d with d = log(pi/ref), and their derivatives 1, d, 1 − e^−d."""
    d = logp - ref
    expected = {"k1": (d, 1), "k2": (d * d / 2, d), "k3": (math.exp(-d) - 1 + d, 1 - math.exp(-d))}
    for name in kl.ESTIMATORS:
        logprobs = torch.tensor([logp], requires_grad=True)
        value = kl.estimate(name, logprobs, torch.tensor([ref]))
        (slope,) = torch.autograd.grad(value.sum(), logprobs)
        assert (value.item(), slope.item()) == pytest.approx(expected[name], rel=1e-5, abs=1e-5)


def test_a_tiny_distance_is_not_lost_to_rounding():
    """k3 keeps its precision where pi is next to ref: at d = 1e-3 it is 5e-7, and not a multiple of float32's 1e-7."""
    found = kl.estimate("k3", torch.tensor([1e-3]), torch.zeros(1)).item()
    assert found == pytest.approx(math.expm1(-1e-3) + 1e-3, rel=1e-3)


def test_k1_and_k3_are_unbiased_and_k2_is_not():
    """Over tokens from pi, k1 and k3 average to KL(pi || ref); k2 does not."""
    true = divergence(forward=False)[0]
    assert on_policy("k1")[0] == pytest.approx(true) and on_policy("k3")[0] == pytest.approx(true)
    assert abs(on_policy("k2")[0] - true) > 0.05


def test_gradients_as_a_loss():
    """As a loss term k1 has no gradient in expectation, k2 that of KL(pi || ref), k3 that of KL(ref || pi)."""
    np.testing.assert_allclose(on_policy("k1")[1], 0, atol=1e-12)
    np.testing.assert_allclose(on_policy("k2")[1], divergence(forward=False)[1], rtol=1e-9)
    np.testing.assert_allclose(on_policy("k3")[1], divergence(forward=True)[1], rtol=1e-9)


def test_in_the_reward_only_k1_has_the_gradient_of_the_divergence():
    """The policy gradient of a reward of -k: k1's is that of -KL(pi || ref); k2 and k3 point elsewhere."""

    def as_a_reward(name):
        logits = torch.tensor(PI, requires_grad=True)
        log_pi = torch.log_softmax(logits, 0)
        score = log_pi.detach().exp() * kl.estimate(name, log_pi, torch.tensor(REF)).detach() * log_pi
        return torch.autograd.grad(score.sum(), logits)[0].numpy()

    true = divergence(forward=False)[1]
    np.testing.assert_allclose(as_a_reward("k1"), true, rtol=1e-9)
    for name in ("k2", "k3"):
        assert np.linalg.norm(as_a_reward(name) - true) > 0.2 * np.linalg.norm(true)


def test_an_unknown_estimator_is_named():
    """A wrong name is refused with the ones there are."""
    with pytest.raises(ValueError, match=r"k4.*k1, k2, k3"):
        kl.estimate("k4", torch.zeros(1), torch.zeros(1))
