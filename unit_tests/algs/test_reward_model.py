"""The reward model against an independent reading of arXiv 2203.02155, 2307.09288 and 2312.09244."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unit_tests.algs import reference
from unit_tests.algs.method_checks import make, pair_steps, policy_tokens, random_pairs

PARAMS = st.sampled_from([{}, {"margin": 0.5}, {"centering": 0.01}, {"margin": 1.0, "centering": 0.5}])


def slope_in_values(method, step):
    t = policy_tokens(step, method)
    values = method.loss(t).loss
    return torch.autograd.grad(values.sum(), t.values)[0].double().numpy()


@settings(max_examples=40)
@given(pair_steps(), PARAMS)
def test_values_equal_the_formula(step, params):
    """Each pair's loss is −log σ(r⁺ − r⁻ − margin) + centering·(r⁺ + r⁻)² of the last tokens' values, in float64."""
    method = make("reward_model", **params)
    answer = method.loss(policy_tokens(step, method))
    expected = reference.reward_model(step, step.value, **params)
    np.testing.assert_allclose(answer.loss.detach(), expected, rtol=2e-5, atol=2e-6)
    assert answer.critic is None and {x.shape for x in answer.metrics.values()} == {(len(set(step.group)),)}


@settings(max_examples=15)
@given(pair_steps(max_pairs=2, max_length=5), PARAMS)
def test_gradient_equals_finite_differences(step, params):
    """The gradient in the values is the central difference of the reference: on last tokens alone."""
    found, h = slope_in_values(make("reward_model", **params), step), 1e-5
    lasts = {tokens[-1] for tokens in step.slices}
    for i in range(len(step.value)):
        nudge = h * (np.arange(len(step.value)) == i)
        up, down = (sum(reference.reward_model(step, step.value + s * nudge, **params)) for s in (1, -1))
        assert found[i] == pytest.approx((up - down) / (2 * h), rel=5e-4, abs=5e-4)
        assert i in lasts or found[i] == 0


def test_equal_scores_cost_log_2_and_centering_alone_moves_their_sum():
    """At equal scores the loss is log 2 and its gradient is ±½; centering adds the same pull on both towards 0."""
    step = random_pairs([1, 1], np.random.default_rng(0))
    level = dataclasses.replace(step, value=np.full(2, 3.0))
    method = make("reward_model")
    assert method.loss(policy_tokens(level, method)).loss.tolist() == pytest.approx([math.log(2)] * 2)
    signs = np.where(step.chosen, -1, 1)
    np.testing.assert_allclose(slope_in_values(method, level) / 2, 0.5 * signs)  # on both of the pair's tokens
    centred = slope_in_values(make("reward_model", centering=0.01), level) / 2
    np.testing.assert_allclose(centred, 0.5 * signs + 0.01 * 2 * 6.0, rtol=1e-5)


def test_metrics_are_the_scores():
    """Chosen and rejected scores, their difference without the margin, and whether it is positive."""
    step = random_pairs([2, 3, 1, 4], np.random.default_rng(1))
    method = make("reward_model", margin=5.0)
    metrics = {name: x.tolist() for name, x in method.loss(policy_tokens(step, method)).metrics.items()}
    score = [step.value[tokens[-1]] for tokens in step.slices]
    pairs = reference.pairs(step)
    assert metrics["chosen_reward"] == pytest.approx([score[w] for w, _ in pairs])
    assert metrics["margin"] == pytest.approx([score[w] - score[r] for w, r in pairs], rel=1e-5)
    assert metrics["accuracy"] == [float(score[w] > score[r]) for w, r in pairs]


def test_it_is_dpo_with_scores_for_rewards():
    """The likelihood is DPO's: with scores of β times the summed log-ratio the two losses are one."""
    step = random_pairs([2, 3, 1, 4], np.random.default_rng(2))
    value = np.zeros_like(step.value)
    for tokens, h in zip(step.slices, reference.log_ratios_of_responses(step, step.logp, False), strict=True):
        value[tokens[-1]] = 0.3 * h
    step = dataclasses.replace(step, value=value)
    one, other = (m.loss(policy_tokens(step, m)).loss for m in (make("reward_model"), make("dpo", beta=0.3)))
    torch.testing.assert_close(one, other)
