"""What is special to PPO (arXiv 1707.06347): critic, GAE (1506.02438), dual clip; test_algs.py holds its formula."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unit_tests.algs import reference
from unit_tests.algs.method_checks import (
    critic_groups,
    gae_by_recursion,
    make,
    one_token,
    policy_tokens,
    steps,
    weight,
)

CRITIC = st.sampled_from([{}, {"vf_clip": None}, {"vf_clip": 0.05, "vf_coef": 2.0}])


@settings(max_examples=30)
@given(steps(max_groups=2, max_size=3), CRITIC)
def test_critic_equals_the_formula_with_its_gradient(step, params):
    """The value loss is vf_coef·½max((V−R)², (V_clip−R)²), values and derivative in V; it does not touch log pi."""
    method = make("ppo", **params)
    t = policy_tokens(step, method)
    found = method.loss(t).critic
    np.testing.assert_allclose(
        found.detach().numpy(), reference.critic(step, step.value, **params), rtol=1e-5, atol=1e-6
    )
    slope, in_policy = torch.autograd.grad(found.sum(), (t.values, t.logprobs), allow_unused=True)
    assert in_policy is None or not in_policy.any()
    h = 1e-6
    up, middle, down = (np.array(reference.critic(step, step.value + d, **params)) for d in (h, 0, -h))
    smooth = np.abs(up - 2 * middle + down) / h < 1e-3
    np.testing.assert_allclose(slope.numpy()[smooth], ((up - down) / (2 * h))[smooth], rtol=1e-3, atol=1e-4)
    assert (~smooth).sum() <= 2


@settings(max_examples=30)
@given(steps())
def test_policy_loss_does_not_train_the_critic(step):
    """The policy's loss has no gradient in V: the two are weighed and corrected apart."""
    method = make("ppo")
    t = policy_tokens(step, method)
    (slope,) = torch.autograd.grad(method.loss(t).loss.sum(), t.values, allow_unused=True)
    assert slope is None or not slope.any()


@pytest.mark.parametrize(("advantage", "ratio", "expected"), [(-1, 6, 0), (-1, 2.9, -2.9), (1, 1.1, 1.1)])
def test_dual_clip_ends_the_weight_of_a_bad_token(advantage, ratio, expected):
    """With dual_clip 3 a token of advantage -1 has no weight past r = 3, where PPO alone would give -r."""
    assert weight(make("ppo", dual_clip=3.0), advantage, ratio) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("dual_clip", "counted"), [(2.0, 0), (2.0 - 2**-20, 1)])
def test_a_token_on_the_dual_clip_is_not_counted(dual_clip, counted):
    """At r = dual_clip nothing is cut off yet."""
    method = make("ppo", dual_clip=dual_clip)
    t = policy_tokens(one_token(-1, 2), method)
    t = dataclasses.replace(t, old_logprobs=t.logprobs - torch.tensor(2.0).log())
    assert torch.exp(t.logprobs - t.old_logprobs).item() == 2.0
    assert method.loss(t).metrics["dual_clip_fraction"].item() == counted


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from([(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.0)]))
def test_advantage_and_returns_are_gae(seed, discounts):
    """Advantages are GAE by its recursion, whitened over the step or not; returns are GAE + V from before whitening."""
    groups = critic_groups(np.random.default_rng(seed))
    params = {**dict(zip(("discount", "gae_lambda"), discounts, strict=True)), "bootstrap_truncated": True}
    expected = gae_by_recursion(groups, *discounts)
    np.testing.assert_allclose(make("ppo", whiten=False, **params).advantages(groups), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        make("ppo", **params).returns(groups), expected + groups.values.numpy(), rtol=1e-4, atol=1e-5
    )
    if len(expected) > 1:
        whitened = (expected - expected.mean()) / expected.std(ddof=1)
        np.testing.assert_allclose(make("ppo", **params).advantages(groups), whitened, rtol=1e-3, atol=1e-4)


def test_needs_a_critic():
    """PPO asks for the critic's values and for no reference."""
    assert make("ppo").needs() == {"values"}


def test_defaults_are_the_peers():
    """vf_coef 0.5, value clip 0.2, discount 1, lambda 0.95, whitened, no dual clip, a cut response worth no more."""
    params = dataclasses.asdict(make("ppo").params)
    assert params == {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "vf_coef": 0.5,
        "bootstrap_truncated": False,
        "vf_clip": 0.2,
        "discount": 1.0,
        "gae_lambda": 0.95,
        "whiten": True,
    }
