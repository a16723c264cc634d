"""What is special to DPO (arXiv 2305.18290): labels, smoothing, lengths, metrics; test_algs.py holds its formula."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algs.parts.aggregation import token_weights
from unit_tests.algs import reference
from unit_tests.algs.method_checks import (
    gradient,
    make,
    pair_steps,
    policy_tokens,
    random_pairs,
)

PARAMS = st.sampled_from(
    [{}, {"beta": 0.5}, {"label_smoothing": 0.1}, {"length_normalized": True, "beta": 2.0, "label_smoothing": 0.3}]
)
STEP = random_pairs([4, 1, 7, 2, 5, 3], np.random.default_rng(0))


def answer(step, **params):
    method = make("dpo", **params)
    return method.loss(policy_tokens(step, method))


@settings(max_examples=20)
@given(pair_steps())
def test_prompt_mean_is_the_mean_over_pairs(step):
    """Under its aggregation the sum over tokens is the mean of the pairs' losses, however long the responses are."""
    values = answer(step).loss.double()
    per_trajectory = token_weights(make("dpo").aggregation, torch.tensor(step.lengths), torch.tensor(step.group), 10)
    total = (per_trajectory.double().repeat_interleave(torch.tensor(step.lengths)) * values).sum().item()
    expected = reference.dpo(step, step.logp, step.logp)
    of_pairs = [expected[step.slices[w].start] for w, _ in reference.pairs(step)]
    assert total == pytest.approx(sum(of_pairs) / len(of_pairs), rel=1e-5)


@settings(max_examples=20)
@given(pair_steps(), PARAMS)
def test_at_the_reference_the_loss_is_log_2(step, params):
    """With pi = pi_ref every margin is 0: the loss is log 2, whatever the lengths and the parameters."""
    found = answer(dataclasses.replace(step, ref=step.logp), **params)
    np.testing.assert_allclose(found.loss.detach(), math.log(2), rtol=1e-6)
    assert not found.metrics["margin"].any() and not found.metrics["accuracy"].any()


def test_label_smoothing_of_one_half_teaches_nothing_at_margin_0():
    """Half of the labels wrong: no gradient at margin 0, and the margin is pulled back to 0 from either side."""
    at_reference = dataclasses.replace(STEP, ref=STEP.logp)
    assert np.abs(gradient(make("dpo", label_smoothing=0.5), at_reference)).max() < 1e-8
    assert np.abs(gradient(make("dpo"), at_reference)).min() > 0.04
    step = random_pairs([1, 1], np.random.default_rng(0))
    w = step.chosen.index(True)
    for shift in (-3.0, 3.0):
        ref = step.logp.copy()
        ref[w] -= shift  # the chosen's log-ratio, and so the margin, is `shift`
        slope = gradient(make("dpo", label_smoothing=0.5), dataclasses.replace(step, ref=ref))
        assert slope[w] * shift > 0


def test_swapping_the_labels_flips_the_margin():
    """Chosen and rejected exchanged: the margin and the rewards change sides, and right pairs become wrong ones."""
    one = answer(STEP).metrics
    other = answer(dataclasses.replace(STEP, chosen=[not c for c in STEP.chosen])).metrics
    torch.testing.assert_close(one["margin"], -other["margin"])
    torch.testing.assert_close(one["chosen_reward"], other["rejected_reward"])
    torch.testing.assert_close(one["accuracy"], 1 - other["accuracy"])


def test_label_smoothing_mixes_the_loss_with_that_of_swapped_labels():
    """With share ε of wrong labels the loss is (1 − ε) of DPO's plus ε of DPO's on the swapped pair; ε = 0 is DPO."""
    swapped = dataclasses.replace(STEP, chosen=[not c for c in STEP.chosen])
    expected = 0.7 * answer(STEP).loss + 0.3 * answer(swapped).loss
    torch.testing.assert_close(answer(STEP, label_smoothing=0.3).loss, expected)
    torch.testing.assert_close(answer(STEP, label_smoothing=0.0).loss, answer(STEP).loss, rtol=0, atol=0)


def test_length_normalisation_takes_means():
    """A response's summed log-ratio grows with its length, its mean does not: the two losses differ but for length 1."""
    ones = random_pairs([1, 1, 1, 1], np.random.default_rng(1))
    torch.testing.assert_close(answer(ones).loss, answer(ones, length_normalized=True).loss)
    assert not torch.allclose(answer(STEP).loss, answer(STEP, length_normalized=True).loss, rtol=1e-2)
    summed = answer(STEP).metrics["chosen_reward"]
    mean = answer(STEP, length_normalized=True).metrics["chosen_reward"]
    lengths = torch.tensor([STEP.lengths[w] for w, _ in reference.pairs(STEP)])
    torch.testing.assert_close(summed, mean * lengths)


def test_metrics_are_those_of_the_pairs():
    """Rewards β log(π/π_ref), their margin, the share of positive margins, and log-probabilities per token."""
    metrics = {name: x.tolist() for name, x in answer(STEP, beta=0.5).metrics.items()}
    h = reference.log_ratios_of_responses(STEP, STEP.logp, False)
    logprobs = reference.mean_logprobs(STEP, STEP.logp)
    pairs = reference.pairs(STEP)
    assert metrics["chosen_reward"] == pytest.approx([0.5 * h[w] for w, _ in pairs], rel=1e-5)
    assert metrics["rejected_reward"] == pytest.approx([0.5 * h[r] for _, r in pairs], rel=1e-5)
    assert metrics["margin"] == pytest.approx([0.5 * (h[w] - h[r]) for w, r in pairs], rel=1e-4)
    assert metrics["accuracy"] == [float(h[w] > h[r]) for w, r in pairs]
    assert metrics["chosen_logprob"] == pytest.approx([logprobs[w] for w, _ in pairs], rel=1e-5)
    assert metrics["rejected_logprob"] == pytest.approx([logprobs[r] for _, r in pairs], rel=1e-5)


@pytest.mark.parametrize(
    ("group", "chosen"), [([0, 0], [True, True]), ([0, 1], [True, False]), ([0, 0, 0, 0], [True, False, True, False])]
)
def test_what_is_no_pair_is_refused(group, chosen):
    """Two chosen responses, a pair cut in two, or two pairs of one group are no pairs."""
    step = dataclasses.replace(random_pairs([2] * len(group), np.random.default_rng(2)), group=group, chosen=chosen)
    with pytest.raises(ValueError, match="one chosen and one rejected"):
        answer(step)
