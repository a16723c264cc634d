"""What is special to ORPO (arXiv 2403.07691): its odds; test_algs.py holds its formula."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from unit_tests.algs import reference
from unit_tests.algs.method_checks import (
    gradient,
    make,
    policy_tokens,
    random_pairs,
)


def test_without_the_odds_term_it_is_maximum_likelihood_of_the_chosen():
    """With λ = 0 the gradient is −1/|y| on the chosen response's tokens, summed over its pair's tokens, 0 on the rejected."""
    step = random_pairs([3, 2, 4, 1], np.random.default_rng(0))
    found = gradient(make("orpo", odds_weight=0.0), step)
    for w, r in reference.pairs(step):
        tokens = step.lengths[w] + step.lengths[r]
        assert found[list(step.slices[w])] == pytest.approx(-tokens / step.lengths[w])
        assert not found[list(step.slices[r])].any()


@pytest.mark.parametrize("likely", [1e-3, 0.5, 0.999])
def test_odds_are_those_of_the_geometric_mean(likely):
    """A response whose tokens have probability p has log odds log(p/(1−p)); the pieces add up to the loss."""
    step = random_pairs([2, 3], np.random.default_rng(1))
    logp = np.full(5, -1.0)
    logp[list(step.slices[step.chosen.index(True)])] = math.log(likely)
    method = make("orpo", odds_weight=0.5)
    answer = method.loss(policy_tokens(dataclasses.replace(step, logp=logp), method))
    metrics = {name: x.item() for name, x in answer.metrics.items()}
    assert metrics["chosen_reward"] == pytest.approx(math.log(likely / (1 - likely)), rel=1e-4)
    assert metrics["nll"] == pytest.approx(-math.log(likely), rel=1e-5)
    assert answer.loss[0].item() == pytest.approx(metrics["nll"] + 0.5 * metrics["odds_loss"], rel=1e-5)


@pytest.mark.parametrize("certain", [True, False])
def test_a_response_of_probability_1_has_a_finite_loss_and_gradient(certain):
    """A log-probability that float32 rounds to 0 has infinite odds; loss and gradient stay finite."""
    step = random_pairs([1, 2], np.random.default_rng(0))
    logp = step.logp.copy()
    logp[list(step.slices[step.chosen.index(certain)])] = 0.0
    method = make("orpo")
    t = policy_tokens(dataclasses.replace(step, logp=logp), method)
    values = method.loss(t).loss
    (slope,) = torch.autograd.grad(values.sum(), t.logprobs)
    assert torch.isfinite(values).all() and torch.isfinite(slope).all()


def test_odds_of_an_almost_certain_response_keep_their_slope():
    """At log P = -1e-4 the log odds rise by 1 / (1 - P), 10,000 for each unit of log P: such responses are not cut off."""
    step = random_pairs([1, 1], np.random.default_rng(0))
    logp, chosen = np.full(2, -1.0), step.chosen.index(True)
    logp[chosen] = -1e-4
    method = make("orpo")
    t = policy_tokens(dataclasses.replace(step, logp=logp), method)
    (slope,) = torch.autograd.grad(method.loss(t).metrics["chosen_reward"].sum(), t.logprobs)
    assert slope[chosen].item() == pytest.approx(1e4, rel=1e-3)
