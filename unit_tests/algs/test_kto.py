"""What is special to KTO (arXiv 2402.01306): its reference point, weights and metrics; test_algs.py holds its formula."""

import dataclasses

import numpy as np
import pytest
import torch

from algs.parts.aggregation import token_weights
from unit_tests.algs import reference
from unit_tests.algs.method_checks import (
    gradient,
    make,
    policy_tokens,
    random_step,
    tensor,
)

STEP = random_step([1] * 6, [4, 1, 7, 2, 5, 3], np.random.default_rng(0))


def moved(shift):
    """The step with every response's log-ratio at `shift` exactly."""
    ref = STEP.logp - np.repeat(shift / np.array(STEP.lengths), STEP.lengths)
    return dataclasses.replace(STEP, ref=ref)


@pytest.mark.parametrize(("shift", "point"), [(-6.0, 0.0), (0.0, 0.0), (6.0, 3.0)])
def test_the_reference_point_is_the_mean_reward_but_never_negative(shift, point):
    """z0 is β times the mean log-ratio of the step's responses, and 0 when that is negative."""
    method = make("kto", beta=0.5)
    found = method.loss(policy_tokens(moved(shift), method)).metrics["reference_point"]
    assert found.tolist() == pytest.approx([point] * 6, abs=1e-5)


def test_the_reference_point_is_that_of_the_whole_step():
    """A micro-batch of two responses uses the mean over all six, not its own."""
    method = make("kto", beta=0.5)
    step = dataclasses.replace(moved(6.0), ref=moved(6.0).ref - (np.arange(22) == 0) * 12.0)  # the first: 18
    assert method.loss(policy_tokens(step, method, [0, 1])).metrics["reference_point"][0].item() == pytest.approx(4.0)


def test_sequence_mean_is_the_mean_over_responses():
    """Under its aggregation the sum over tokens is the mean of the responses' losses, also where prompts repeat."""
    step = random_step([3, 1, 2], [4, 1, 7, 2, 5, 3], np.random.default_rng(1))
    method = make("kto")
    values = method.loss(policy_tokens(step, method)).loss.double()
    per_trajectory = token_weights(method.aggregation, torch.tensor(step.lengths), torch.tensor(step.group), 10)
    total = (per_trajectory.double().repeat_interleave(torch.tensor(step.lengths)) * values).sum().item()
    expected = reference.kto(step, step.logp, step.logp)
    assert total == pytest.approx(np.mean([expected[part.start] for part in step.slices]), rel=1e-5)


def test_desirable_responses_are_raised_and_undesirable_lowered():
    """The gradient's sign follows the label, its size the label's weight."""
    signs = np.repeat([-1 if c else 1 for c in STEP.chosen], STEP.lengths)
    plain = gradient(make("kto"), STEP)
    assert (np.sign(plain) == signs).all() and {True, False} == set(STEP.chosen)
    weighted = gradient(make("kto", desirable_weight=3.0, undesirable_weight=0.0), STEP)
    np.testing.assert_allclose(weighted, np.where(signs < 0, 3 * plain, 0), rtol=1e-5, atol=1e-9)


def test_metrics_are_over_the_responses_they_speak_of():
    """Rewards and log-probabilities of desirable and of undesirable responses apart; accuracy over all, against z0."""
    method = make("kto", beta=0.5)
    answer = method.loss(policy_tokens(STEP, method))
    chosen = torch.tensor(STEP.chosen)
    reward = tensor(0.5 * np.array(reference.log_ratios_of_responses(STEP, STEP.logp, False)))
    logprob = tensor(reference.mean_logprobs(STEP, STEP.logp))
    torch.testing.assert_close(answer.metrics["chosen_reward"], reward[chosen], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(answer.metrics["rejected_reward"], reward[~chosen], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(answer.metrics["chosen_logprob"], logprob[chosen])
    torch.testing.assert_close(answer.metrics["rejected_logprob"], logprob[~chosen])
    above = reward > reward.mean().clamp(min=0)
    assert answer.metrics["accuracy"].tolist() == (above == chosen).float().tolist()
