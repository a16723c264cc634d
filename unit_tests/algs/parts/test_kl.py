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
    """k1 = d, k2 = d²/2, k3 = e^−d − 1 + d with d = log(pi/ref), and their derivatives 1, d, 1 − e^−d; k3 is linear
    where d is below -5."""
    d = logp - ref
    near = max(d, -5)
    slope = 1 - math.exp(-near)
    expected = {"k1": (d, 1), "k2": (d * d / 2, d), "k3": (math.exp(-near) - 1 + near + slope * (d - near), slope)}
    for name in kl.ESTIMATORS:
        logprobs = torch.tensor([logp], requires_grad=True)
        value = kl.estimate(name, logprobs, torch.tensor([ref]))
        (slope,) = torch.autograd.grad(value.sum(), logprobs)
        assert (value.item(), slope.item()) == pytest.approx(expected[name], rel=1e-5, abs=1e-5)


def test_one_far_token_does_not_outweigh_a_thousand_in_k3():
    """With log(ref/pi) = 15 one token had thousands of times the gradient of all others; its pull keeps sign and grows no more."""
    distance = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    distance[500] = -15
    distance.requires_grad_()
    (slope,) = torch.autograd.grad(kl.estimate("k3", distance, torch.zeros(1000)).sum(), distance)
    others = torch.cat([slope[:500], slope[501:]]).norm()
    assert slope[500] == pytest.approx(1 - math.exp(5)) and abs(slope[500]) < 3 * others


@pytest.mark.parametrize("name", kl.ESTIMATORS)
@pytest.mark.parametrize("distance", [-1000.0, -100.0, 100.0, 1000.0])
def test_no_distance_overflows(name, distance):
    logprobs = torch.tensor([distance], requires_grad=True)
    for value in (
        kl.estimate(name, logprobs, torch.zeros(1)),
        *([kl.weighted(name, logprobs, torch.zeros(1), torch.zeros(1))] if name != "k1" else []),
    ):
        (slope,) = torch.autograd.grad(value.sum(), logprobs)
        assert torch.isfinite(value).all() and torch.isfinite(slope).all()


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


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_off_policy_the_ratio_to_the_sampling_policy_makes_the_gradient_exact(name):
    """Over tokens of mu: weighted by pi / mu the gradient is that of KL(pi || ref), and k3's value the KL's; plain k2
    and k3, or a ratio to a third policy pi_old, are far from it."""
    mu = torch.log_softmax(torch.tensor(PI[::-1].copy()), 0)
    old = torch.log_softmax(torch.tensor(0.5 * PI), 0)

    def over_tokens_of_mu(terms):
        logits, log_ref = torch.tensor(PI, requires_grad=True), torch.tensor(REF)
        value = (mu.exp() * terms(torch.log_softmax(logits, 0), log_ref)).sum()
        return value.item(), torch.autograd.grad(value, logits)[0].numpy()

    true_value, true = divergence(forward=False)
    value, gradient = over_tokens_of_mu(lambda pi, ref: kl.weighted(name, pi, mu, ref))
    np.testing.assert_allclose(gradient, true, rtol=1e-9, atol=1e-12)
    assert (value == pytest.approx(true_value)) == (name == "k3")
    for wrong in (
        lambda pi, ref: kl.estimate(name, pi, ref),
        lambda pi, ref: kl.weighted(name, pi, old, ref),
    ):
        assert np.linalg.norm(over_tokens_of_mu(wrong)[1] - true) > 0.2 * np.linalg.norm(true)


def test_the_weighted_terms_are_their_definitions_in_value_and_slope():
    """sg(pi/mu) k2 and (pi/mu) k3 with the ratio's own gradient; in float32 also where ref / pi is e^25."""
    random = torch.Generator().manual_seed(0)
    pi, mu, ref = -5 * torch.rand(3, 50, generator=random, dtype=torch.float64)
    for name, ratio_of in (("k2", lambda x: torch.exp(x - mu).detach()), ("k3", lambda x: torch.exp(x - mu))):
        x = pi.clone().requires_grad_()
        expected = ratio_of(x) * kl.estimate(name, x, ref)
        found = kl.weighted(name, x, mu, ref)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0])
    far = torch.tensor([-26.0], requires_grad=True)
    (slope,) = torch.autograd.grad(kl.weighted("k3", far, torch.tensor([-26.0]), torch.tensor([-1.0])).sum(), far)
    assert slope.item() == pytest.approx(-25)


def test_k2_in_the_loss_leaves_out_what_a_token_does_to_later_kl():
    """Responses of two tokens: k1 in the reward has the gradient of the KL of whole responses, k2 in the loss has not."""
    ref = torch.log_softmax(torch.tensor([[0.5, -0.5], [1.0, 0.0], [-1.0, 2.0]], dtype=torch.float64), 1)
    logits = torch.tensor([[0.0, 1.0], [0.3, -0.8], [0.9, 0.1]], dtype=torch.float64, requires_grad=True)
    log_pi = torch.log_softmax(logits, 1)  # [first token, or after token 0, or after token 1][token]
    whole = in_loss = in_reward = torch.zeros(())
    for first in (0, 1):
        for second in (0, 1):
            pi = torch.stack([log_pi[0, first], log_pi[1 + first, second]])
            at_ref = torch.stack([ref[0, first], ref[1 + first, second]])
            probability = pi.sum().exp()
            whole = whole + probability * (pi - at_ref).sum()
            in_loss = in_loss + probability.detach() * kl.estimate("k2", pi, at_ref).sum()
            in_reward = in_reward + probability.detach() * kl.estimate("k1", pi, at_ref).sum().detach() * pi.sum()
    true, loss, reward = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (whole, in_loss, in_reward))
    torch.testing.assert_close(reward, true)
    assert (loss - true).norm() > 0.1 * true.norm()


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
