"""What is special to P3O (arXiv 2605.12380): its KL term next to mu; test_algs.py holds its formula."""

import dataclasses

import numpy as np
import pytest
import torch

from unit_tests.algs.method_checks import (
    make,
    policy_tokens,
    random_step,
)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_kl_term_keeps_its_precision_next_to_mu(direction):
    """Near ρ = 1 the KL term is ½(log ρ)² and not a multiple of float32's rounding of ρ, which may be negative."""
    method = make("p3o", kl_direction=direction)
    log_rho = torch.tensor([-2e-3, -1e-3, -1e-4, 0.0, 1e-5, 1e-4, 1e-3, 2e-3])
    t = policy_tokens(random_step([8], [1] * 8, np.random.default_rng(0)), method)
    t = dataclasses.replace(t, logprobs=log_rho, behavior_logprobs=torch.zeros(8))
    found = method.loss(t).metrics["kl_behavior"]
    np.testing.assert_allclose(found, log_rho.square() / 2, rtol=5e-3, atol=2e-11)
