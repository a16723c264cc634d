"""SFT is maximum likelihood."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algs.parts.aggregation import token_weights
from unit_tests.algs.method_checks import make, policy_tokens, steps, tensor


@settings(max_examples=20)
@given(steps(), st.integers(0, 99))
def test_the_loss_of_a_step_is_torchs_cross_entropy(step, seed):
    """Summed with token_mean's weights it is torch's mean cross-entropy over the trained tokens, and so is its gradient."""
    method, n = make("sft"), len(step.logp)
    rng = np.random.default_rng(seed)
    logits, targets = tensor(rng.normal(0, 2, (n, 7))).requires_grad_(), torch.tensor(rng.integers(0, 7, n))
    logprobs = logits.log_softmax(1)[torch.arange(n), targets]
    values = method.loss(dataclasses.replace(policy_tokens(step, method), logprobs=logprobs)).loss
    weights = token_weights(method.aggregation, torch.tensor(step.lengths), torch.tensor(step.group), 0)
    loss = (weights.repeat_interleave(torch.tensor(step.lengths)) * values).sum()
    expected = torch.nn.functional.cross_entropy(logits, targets)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    found, right = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (loss, expected))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-7)


def test_nothing_but_the_log_probabilities_is_asked_for():
    """No reference, no critic, no advantage; it learns from demonstrations."""
    method = make("sft")
    assert method.needs() == frozenset() and method.data == "demonstrations"
    with pytest.raises(NotImplementedError, match="no advantage"):
        method.advantages(None)
