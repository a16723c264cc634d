"""What the methods are to each other: the same numbers from two files under the stated condition, different ones without."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algs import advantages, corrections
from unit_tests.algs.method_checks import (
    gradient,
    groups_of,
    make,
    policy_tokens,
    ragged_rewards,
    random_step,
    steps,
    weight,
)

STEP = random_step([3, 2, 4], [4, 1, 7, 2, 5, 3, 3, 6, 2], np.random.default_rng(3))
ON_POLICY = dataclasses.replace(STEP, old=STEP.logp, mu=STEP.logp)
SURROGATES = [
    "ppo", "grpo", "dr_grpo", "dapo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "lite_ppo", "decoupled_ppo",
]  # fmt: skip
NO_CLIP = {"clip_low": 0.999999, "clip_high": 1e9}


def same(one, other, step, rtol=1e-5):
    np.testing.assert_allclose(gradient(one, step), gradient(other, step), rtol=rtol, atol=1e-5)


def values(method, step):
    return method.loss(policy_tokens(step, method)).loss.detach().numpy()


@settings(max_examples=40)
@given(ragged_rewards)
def test_rloo_is_group_mean_times_g_over_g_less_one(rewards):
    """The leave-one-out advantage is G/(G−1) times the distance to the group's mean; 0 for a group of one."""
    groups = groups_of(rewards)
    sizes = np.repeat([len(g) for g in rewards], [len(g) for g in rewards])
    factor = np.where(sizes > 1, sizes / np.maximum(sizes - 1, 1), 0)
    expected = factor * advantages.group_mean(groups).double().numpy()
    np.testing.assert_allclose(advantages.rloo(groups), expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=30)
@given(ragged_rewards, st.floats(0.5, 4), st.floats(-3, 3))
def test_advantages_ignore_shift_and_scale_of_rewards_as_they_should(rewards, scale, shift):
    """Normalised advantages do not change when all rewards are shifted and scaled; unnormalised ones scale along."""
    plain, moved = groups_of(rewards), groups_of([[scale * r + shift for r in g] for g in rewards])
    for function in (advantages.group_zscore, advantages.lite_ppo, advantages.scale_rl, advantages.reinforce_plus_plus):
        torch.testing.assert_close(function(plain), function(moved), rtol=1e-3, atol=1e-3)
    for function in (advantages.group_mean, advantages.rloo):
        torch.testing.assert_close(scale * function(plain), function(moved), rtol=1e-3, atol=1e-4)


@settings(max_examples=30)
@given(ragged_rewards)
def test_in_one_group_the_normalised_advantages_are_multiples_of_each_other(rewards):
    """When the step is one group, Lite PPO and ScaleRL are one and the same, sqrt(G/(G−1)) times GRPO's z-score."""
    group = rewards[0]
    if len(group) < 2 or len(set(group)) < 2:
        return
    groups = groups_of([group])
    factor = (len(group) / (len(group) - 1)) ** 0.5
    for function in (advantages.lite_ppo, advantages.scale_rl):
        torch.testing.assert_close(function(groups), factor * advantages.group_zscore(groups), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        advantages.reinforce_plus_plus(groups), advantages.group_zscore(groups), rtol=1e-4, atol=1e-5
    )


def test_rloo_and_reinforce_have_one_loss():
    """RLOO is REINFORCE with another advantage."""
    same(make("rloo"), make("reinforce"), STEP)
    assert (values(make("rloo"), STEP) == values(make("reinforce"), STEP)).all()


@pytest.mark.parametrize("name", [*SURROGATES, "cispo", "scale_rl", "aipo", "gspo", "sapo", "p3o"])
def test_on_policy_every_method_has_reinforces_gradient(name):
    """At pi = pi_old = mu every ratio is 1 and the gradient is −Â grad log pi: token by token, GSPO over a response."""
    if name == "gspo":
        by_token, token = gradient(make("reinforce"), ON_POLICY), gradient(make("gspo", level="token"), ON_POLICY)
        np.testing.assert_allclose(token, by_token, rtol=1e-5)
    same(make(name), make("reinforce"), ON_POLICY)
    assert not np.allclose(gradient(make(name), STEP), gradient(make("reinforce"), STEP))


def test_cispo_without_a_binding_cap_is_reinforce_with_token_importance_sampling():
    """With pi_old against mu moved into r, CISPO uncapped has the gradient of REINFORCE under TIS without a cap."""
    step = dataclasses.replace(STEP, old=STEP.mu)
    t = policy_tokens(step, make("reinforce"))
    tis = corrections.token_truncate(dataclasses.replace(t, old_logprobs=t.logprobs.detach()), cap=1e9).weights
    (expected,) = torch.autograd.grad((tis * make("reinforce").loss(t).loss).sum(), t.logprobs)
    np.testing.assert_allclose(gradient(make("cispo", ratio_cap=1e9), step), expected, rtol=1e-5, atol=1e-6)
    assert not np.allclose(gradient(make("cispo", ratio_cap=1.0), step), expected)


@pytest.mark.parametrize("name", SURROGATES[:-1])
def test_an_unclipped_surrogate_has_cispos_uncapped_gradient(name):
    """grad r = r grad log pi: the surrogate with no clip and CISPO with no cap are one gradient, not one value."""
    same(make(name, **NO_CLIP), make("cispo", ratio_cap=1e9), STEP)
    assert not np.allclose(values(make(name, **NO_CLIP), STEP), values(make("cispo", ratio_cap=1e9), STEP))


@settings(max_examples=20)
@given(steps(), st.sampled_from([1.0, 2.0, 5.0]))
def test_scale_rls_loss_is_cispos(step, cap):
    """ScaleRL and CISPO have equal losses and gradients at an equal cap; they differ in advantage and averaging."""
    one, other = make("scale_rl", ratio_cap=cap), make("cispo", ratio_cap=cap)
    assert (values(one, step) == values(other, step)).all() and (gradient(one, step) == gradient(other, step)).all()


@settings(max_examples=20)
@given(steps(), st.sampled_from([1.0, 2.0, 5.0]))
def test_aipo_is_cispo_with_mu_as_pi_old(step, cap):
    """AIPO and CISPO differ in what the ratio is against: with pi_old := mu, as under old_logprobs: engine, they agree."""
    step = dataclasses.replace(step, old=step.mu)
    assert (values(make("aipo", ratio_cap=cap), step) == values(make("cispo", ratio_cap=cap), step)).all()


@settings(max_examples=20)
@given(steps())
def test_every_symmetric_surrogate_is_grpos(step):
    """PPO's policy loss, Dr. GRPO's, REINFORCE++'s and Lite PPO's are GRPO's; DAPO's too at ε_h 0.2."""
    expected = values(make("grpo"), step)
    for name in ("ppo", "dr_grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "lite_ppo"):
        assert (values(make(name, dual_clip=3.0), step) == expected).all()
    assert (values(make("dapo", clip_high=0.2), step) == expected).all()


def test_gspo_on_one_token_responses_is_grpos_surrogate():
    """With responses of one token the sequence ratio is the token's, at both levels and the same clip."""
    step = random_step([3, 2], [1] * 5, np.random.default_rng(1))
    for level in ("sequence", "token"):
        gspo, grpo = make("gspo", clip_low=0.2, clip_high=0.2, level=level), make("grpo")
        np.testing.assert_allclose(values(gspo, step), values(grpo, step), rtol=1e-6)
        same(gspo, grpo, step)


@settings(max_examples=20)
@given(steps())
def test_decoupled_ppo_with_mu_as_pi_old_is_grpos_surrogate(step):
    """When pi_old is mu the behaviour weight is 1 and the decoupled surrogate is GRPO's, values and gradient."""
    step = dataclasses.replace(step, mu=step.old)
    assert (values(make("decoupled_ppo"), step) == values(make("grpo"), step)).all()
    assert (gradient(make("decoupled_ppo"), step) == gradient(make("grpo"), step)).all()


def test_decoupled_ppo_is_grpo_under_a_tis_correction():
    """DecoupledPPO's own weight is token_mask's from 0 on, or clamped token_truncate's: GRPO with that correction and the
    same cap is the same loss."""
    t = policy_tokens(STEP, make("grpo"))
    for above_cap, correction in (
        ("drop", corrections.token_mask(t, low=0.0, high=2.0)),
        ("clamp", corrections.token_truncate(t, cap=2.0)),
    ):
        found = values(make("decoupled_ppo", behavior_cap=2.0, above_cap=above_cap), STEP)
        np.testing.assert_allclose(found, correction.weights.numpy() * values(make("grpo"), STEP), rtol=1e-5)


def test_p3o_is_aipo_at_cap_ess_when_mu_is_near():
    """P3O's policy term is AIPO's with ESS as the cap; the rest of its gradient does not depend on the advantage."""
    step = random_step([3, 2], [4, 1, 7, 2, 5], np.random.default_rng(1))
    silent = dataclasses.replace(step, advantage=np.zeros_like(step.advantage))
    ess = make("p3o").loss(policy_tokens(step, make("p3o"))).metrics["ess"][0].item()
    policy_term = gradient(make("p3o"), step) - gradient(make("p3o"), silent)
    np.testing.assert_allclose(policy_term, gradient(make("aipo", ratio_cap=ess), step), rtol=1e-4, atol=1e-5)
    assert 0.05 < ess < 0.95 and np.abs(gradient(make("p3o"), silent)).max() > 0.01


@pytest.mark.parametrize("tau", [0.3, 1.0, 1.05, 5.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 2.5])
def test_sapos_gate_is_open_at_ratio_one(advantage, tau):
    """At r = 1 the soft clip's weight is Â whatever the temperature, and it falls on both sides for small changes in 4σ'."""
    method = make("sapo", tau_positive=tau, tau_negative=tau)
    assert weight(method, advantage, 1.0) == pytest.approx(advantage, rel=1e-5)
    for ratio in (0.3, 3.0):
        assert abs(weight(method, advantage, ratio)) < abs(advantage) * ratio


def test_a_vanishing_temperature_is_no_clip_at_all():
    """As tau goes to 0 the soft clip's gradient becomes that of the unclipped surrogate, r Â grad log pi."""
    same(make("sapo", tau_positive=1e-3, tau_negative=1e-3), make("grpo", **NO_CLIP), STEP, rtol=1e-3)


@pytest.mark.parametrize("name", ["ppo", "grpo", "cispo", "aipo", "p3o", "gspo", "decoupled_ppo", "reinforce"])
def test_losses_are_linear_in_a_positive_scale_of_the_advantage(name):
    """Twice the advantage is twice the policy term: no method has a hidden normalisation in its loss."""
    double = dataclasses.replace(STEP, advantage=2 * STEP.advantage)
    silent = dataclasses.replace(STEP, advantage=0 * STEP.advantage)
    method = make(name)
    rest = gradient(method, silent)
    np.testing.assert_allclose(
        gradient(method, double) - rest, 2 * (gradient(method, STEP) - rest), rtol=1e-4, atol=1e-5
    )
