"""GAE against the backward recursion, by hand, and at its edges."""

import dataclasses

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algs.parts.gae import gae
from algs.records import Groups
from unit_tests.algs.method_checks import critic_groups, gae_by_recursion, tensor


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.0)]))
def test_gae_equals_the_recursion(seed, discounts):
    """Each token's GAE is the backward recursion's: a cut response bootstraps with V, one that ended does not."""
    groups = critic_groups(np.random.default_rng(seed))
    found = gae(groups, *discounts, bootstrap_truncated=True)
    np.testing.assert_allclose(found, gae_by_recursion(groups, *discounts), rtol=1e-4, atol=1e-5)


def test_gae_by_hand():
    """Two tokens, reward 1 at the end, V 0.5, 0.25 and then 0.125: ended and cut, discount 0.9, lambda 0.5."""
    for cut, expected in ((False, [0.9 * 0.25 - 0.5 + 0.45 * 0.75, 0.75]), (True, [-0.275 + 0.45 * 0.8625, 0.8625])):
        groups = Groups(
            rewards=tensor(np.ones(1)),
            group=torch.zeros(1, dtype=torch.int64),
            lengths=torch.tensor([2]),
            truncated=torch.tensor([cut]),
            token_rewards=tensor(np.array([0.0, 1.0])),
            values=tensor(np.array([0.5, 0.25])),
            final_values=tensor(np.array([0.125])),
        )
        np.testing.assert_allclose(gae(groups, 0.9, 0.5, True), expected, rtol=1e-6)


def test_gae_at_lambda_one_is_the_return_less_v():
    """With discount and lambda 1 and no cut, A_t + V_t is the sum of the rewards that follow."""
    groups = critic_groups(np.random.default_rng(5))
    rewards = groups.token_rewards.double().numpy()
    found = gae(groups, 1.0, 1.0, True).double().numpy() + groups.values.double().numpy()
    ends = np.cumsum(groups.lengths.numpy())
    for end, length, cut, final in zip(
        ends, groups.lengths.tolist(), groups.truncated, groups.final_values, strict=True
    ):
        part = slice(end - length, end)
        expected = np.cumsum(rewards[part][::-1])[::-1] + (final.item() if cut else 0)
        np.testing.assert_allclose(found[part], expected, rtol=1e-4, atol=1e-5)


def test_gae_without_bootstrapping_treats_a_cut_response_as_ended():
    """bootstrap_truncated false: the advantage of cut responses is that of the same responses when they ended."""
    groups = critic_groups(np.random.default_rng(8))
    assert groups.truncated.any()
    ended = dataclasses.replace(groups, truncated=torch.zeros_like(groups.truncated))
    found = gae(groups, 1.0, 0.95, False)
    assert torch.equal(found, gae(ended, 1.0, 0.95, True))
    assert not torch.equal(found, gae(groups, 1.0, 0.95, True))
