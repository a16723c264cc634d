"""What is special to IPO (arXiv 2310.12036): where its minimum lies; test_algs.py holds its formula."""

import dataclasses

import numpy as np
import pytest

from unit_tests.algs.method_checks import (
    gradient,
    make,
    policy_tokens,
    random_pairs,
)


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
