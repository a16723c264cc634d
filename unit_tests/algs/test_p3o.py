"""What is special to P3O (arXiv 2605.12380): its KL term next to mu; test_algs.py holds its formula."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from unit_tests.algs.method_checks import (
    make,
    policy_tokens,
    random_step,
)


@pytest.mark.parametrize("direction", ["reverse", "forward", "k3"])
def test_kl_term_keeps_its_precision_next_to_mu(direction):
    """Near ρ = 1 the KL term is ½(log ρ)² and not a multiple of float32's rounding of ρ, which may be negative."""
    method = make("p3o", kl_direction=direction)
    log_rho = torch.tensor([-2e-3, -1e-3, -1e-4, 0.0, 1e-5, 1e-4, 1e-3, 2e-3])
    t = policy_tokens(random_step([8], [1] * 8, np.random.default_rng(0)), method)
    t = dataclasses.replace(t, logprobs=log_rho, behavior_logprobs=torch.zeros(8))
    found = method.loss(t).metrics["kl_behavior"]
    np.testing.assert_allclose(found, log_rho.square() / 2, rtol=5e-3, atol=2e-11)


@pytest.mark.parametrize(("rho", "reverse", "authors"), [(6, 10.75, 0.83), (20, 59.9, 0.95), (0.1, -0.23, -9.0)])
def test_weight_of_the_kl_term_by_ours_and_by_the_authors_code(rho, reverse, authors):
    """Before 1 - ESS the KL's derivative is rho log rho by the reverse KL, and 1 - 1/rho by the authors' k3."""
    step = random_step([2], [1, 1], np.random.default_rng(0))
    for direction, expected in (("reverse", reverse), ("k3", authors)):
        method = make("p3o", kl_direction=direction)
        t = policy_tokens(step, method)
        half = {"rho": torch.tensor(1.0), "rho_squared": torch.tensor(1.0), "tokens": torch.tensor(2.0)}  # ESS = 1/2
        logprobs = t.behavior_logprobs.add(math.log(rho)).requires_grad_()
        t = dataclasses.replace(t, logprobs=logprobs, advantages=torch.zeros(2), update_sums=half)
        (slope,) = torch.autograd.grad(method.loss(t).loss.sum(), logprobs)
        assert slope.tolist() == pytest.approx([expected / 2] * 2, rel=2e-2)


def test_rounding_never_turns_the_kls_sign():
    """Equal ratios have an ESS of 1; sums that are rounded to a little more give a KL weight of 0, not below."""
    method = make("p3o")
    t = policy_tokens(random_step([2], [2, 3], np.random.default_rng(0)), method)
    rounded = {"rho": torch.tensor(5.0), "rho_squared": torch.tensor(4.999), "tokens": torch.tensor(5.0)}
    answer = method.loss(dataclasses.replace(t, advantages=torch.zeros(5), update_sums=rounded))
    assert (answer.metrics["ess"] == 1).all() and not answer.loss.any()
