"""However the trajectories of a step are cut into micro-batches and ordered, loss and gradient are the same.

Every method meets every aggregation. The sums over the step are made once and given to each micro-batch, the weights are
made once on the whole step; the same with ranks and the real trainer is tested in unit_tests/orchestration.
"""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algs.method import PolicyMethod
from algs.parts.aggregation import MODES, token_weights
from unit_tests.algs.method_checks import (
    NAMES,
    inseparable,
    make,
    policy_tokens,
    positions,
    random_pairs,
    random_step,
    steps_for,
    tensor,
)


def summed(method, step, weights, parts):
    """Loss of the step, its gradient in every log-probability and every value, over these micro-batches."""
    loss, slopes = 0.0, np.zeros((2, len(step.logp)))
    for part in parts:
        t, index = policy_tokens(step, method, part), positions(step, part)
        answer = method.loss(t)
        total = answer.loss if answer.critic is None else answer.loss + answer.critic
        total = (tensor(weights[index]) * total).double().sum()
        found = torch.autograd.grad(total, (t.logprobs, t.values), allow_unused=True)
        loss += total.item()
        for row, slope in zip(slopes, found, strict=True):
            row[index] = 0 if slope is None else slope.double().numpy()
    return loss, slopes


def cut(order, borders):
    """What must stay together, in this order, cut before each border."""
    places = [0, *sorted({b % len(order) for b in borders} - {0}), len(order)]
    return [list(itertools.chain(*order[a:b])) for a, b in itertools.pairwise(places)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10)
@given(data=st.data(), seed=st.integers(0, 99), borders=st.lists(st.integers(0, 20), max_size=5))
def test_any_split_and_order_give_one_loss_and_gradient(name, mode, data, seed, borders):
    """Loss and gradient are the same for any split of whole trajectories (of whole pairs, for a method that learns from
    pairs) into micro-batches, in any order."""
    method, step = make(name), data.draw(steps_for(name, max_groups=3, max_size=4))
    per_trajectory = token_weights(mode, torch.tensor(step.lengths), torch.tensor(step.group), max_new_tokens=10)
    weights = np.repeat(per_trajectory.double().numpy(), step.lengths)
    loss, slopes = summed(method, step, weights, [list(range(len(step.lengths)))])
    order, rng = inseparable(name, step), np.random.default_rng(seed)
    order = [rng.permutation(order[i]).tolist() for i in rng.permutation(len(order))]
    split_loss, split_slopes = summed(method, step, weights, cut(order, borders))
    assert split_loss == pytest.approx(loss, rel=1e-4, abs=1e-5)
    np.testing.assert_allclose(split_slopes, slopes, rtol=1e-4, atol=1e-6)


def test_the_check_can_fail():
    """Cutting inside a response, as no packing does, changes GSPO; so do P3O's sums taken over a micro-batch alone, and a
    pair cut in two is refused."""
    pairs = random_pairs([4, 1, 7, 2], np.random.default_rng(0))
    with pytest.raises(ValueError, match="in one micro-batch"):
        summed(make("dpo"), pairs, np.ones(14), [[pairs.group.index(0)], [pairs.group.index(1)]])
    step = random_step([2], [6, 5], np.random.default_rng(0))
    weights = np.ones(11)
    halves = dataclasses.replace(step, lengths=[3, 3, 5], group=[0, 0, 0], chosen=[])
    whole = summed(make("gspo"), step, weights, [[0, 1]])[1]
    assert not np.allclose(summed(make("gspo"), halves, weights, [[0, 1, 2]])[1], whole)
    p3o, alone = make("p3o"), dataclasses.replace(step, lengths=[6], group=[0])
    alone = dataclasses.replace(alone, **{k: getattr(step, k)[:6] for k in ("logp", "old", "mu", "ref", "advantage")})
    alone = dataclasses.replace(alone, **{k: getattr(step, k)[:6] for k in ("value", "old_value", "returns")})
    assert not np.allclose(summed(p3o, alone, weights, [[0]])[1][0], summed(p3o, step, weights, [[0], [1]])[1][0, :6])


@pytest.mark.parametrize("name", NAMES)
def test_sums_over_the_step_are_exact_sums_of_micro_batches(name):
    """update_sums gives one number per token, whose sums over micro-batches are those over the step."""
    step = random_pairs([4, 1, 7, 2, 5, 3], np.random.default_rng(1))
    method = make(name)
    whole = method.update_sums(policy_tokens(step, method))
    parts = [method.update_sums(policy_tokens(step, method, part)) for part in ([4, 0], [2], [1, 3, 5])]
    for key, values in whole.items():
        assert values.shape == step.logp.shape
        total = sum(part[key].double().sum().item() for part in parts)
        assert total == pytest.approx(values.double().sum().item(), rel=1e-6)
    assert bool(whole) == (type(method).update_sums is not PolicyMethod.update_sums)
