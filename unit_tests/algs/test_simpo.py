"""What is special to SimPO (arXiv 2405.14734): its margin, and no reference; test_algs.py holds its formula."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unit_tests.algs.method_checks import (
    gradient,
    make,
    pair_steps,
    policy_tokens,
    random_pairs,
)


@settings(max_examples=20)
@given(pair_steps(), st.sampled_from([0.1, 2.0]))
def test_without_gamma_it_is_length_normalised_dpo_without_a_reference(step, beta):
    """With γ = 0 loss and gradient are those of DPO on means, with log π_ref = 0 in the reference's place."""
    without = dataclasses.replace(step, ref=np.zeros_like(step.logp))
    simpo, dpo = make("simpo", beta=beta, gamma=0.0), make("dpo", beta=beta, length_normalized=True)
    one, other = (m.loss(policy_tokens(without, m)).loss for m in (simpo, dpo))
    torch.testing.assert_close(one, other)
    np.testing.assert_allclose(gradient(simpo, without), gradient(dpo, without), rtol=1e-5, atol=1e-7)


def test_the_chosen_must_win_by_gamma():
    """Equal responses cost log(1 + e^γ); with the margin at γ the loss is log 2. The reported margin is without γ."""
    step = random_pairs([2, 2], np.random.default_rng(0))
    for margin, expected in ((0.0, math.log1p(math.exp(1.5))), (1.5, math.log(2))):
        logp = np.full(4, -2.0)
        logp[list(step.slices[step.chosen.index(True)])] += margin / 2.0
        method = make("simpo", beta=2.0, gamma=1.5)
        answer = method.loss(policy_tokens(dataclasses.replace(step, logp=logp), method))
        assert answer.loss.tolist() == pytest.approx([expected] * 4, rel=1e-5)
        assert answer.metrics["margin"].item() == pytest.approx(margin)


def test_no_reference_is_asked_for():
    """The reference's log-probabilities are not read, and not named in needs()."""
    method = make("simpo")
    t = policy_tokens(random_pairs([2, 3], np.random.default_rng(0)), method)
    assert method.needs() == frozenset()
    assert torch.isfinite(method.loss(dataclasses.replace(t, ref_logprobs=None)).loss).all()
