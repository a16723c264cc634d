"""Advantages against explicit loops over groups and tokens, and what they promise at the edges."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algs import advantages
from unit_tests.algs import reference
from unit_tests.algs.method_checks import (
    check_advantage,
    critic_groups,
    gae_by_recursion,
    groups_of,
    ragged_rewards,
    tensor,
)

REFERENCES = {
    "group_mean": reference.centred,
    "group_zscore": reference.group_zscore,
    "rloo": reference.rloo,
    "lite_ppo": reference.lite_ppo,
    "scale_rl": reference.scale_rl_advantage,
    "reinforce_plus_plus": reference.reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reference.reinforce_plus_plus_baseline,
}
DIVIDES_BY_A_GROUP = ("group_mean", "group_zscore", "rloo", "lite_ppo", "scale_rl")


@pytest.mark.parametrize("name", REFERENCES)
@settings(max_examples=40)
@given(rewards=ragged_rewards, seed=st.integers(0, 99))
def test_equal_the_loops_on_ragged_groups_with_ties(name, rewards, seed):
    """Every response's advantage is the formula's, whatever the group sizes and the order the responses lie in."""
    check_advantage(getattr(advantages, name), REFERENCES[name], rewards, seed)


@pytest.mark.parametrize("value", [0.1, 0.9, 1 / 3, 1e6])
@pytest.mark.parametrize("size", [1, 2, 7, 8])
@pytest.mark.parametrize("name", DIVIDES_BY_A_GROUP)
def test_equal_rewards_give_exactly_zero(name, size, value):
    """A group of equal rewards, or of one, gets 0 and not rounding noise over a small spread."""
    groups = groups_of([[value] * size, [0.0, 1.0]])
    found = getattr(advantages, name)(groups)
    assert (found[:size] == 0).all() and (found[size:] != 0).all()


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("rewards", [[[0.3]], [[0.3, 0.3], [0.3]], [[1e6] * 3] * 2])
def test_a_step_without_any_spread_gives_exactly_zero(name, rewards):
    """When all rewards of the step are equal nothing is learnt, and nothing is divided by zero."""
    assert (getattr(advantages, name)(groups_of(rewards)) == 0).all()


def test_reinforce_plus_plus_baseline_gives_a_group_of_one_exactly_zero():
    """Groups without a contrast get 0 and not the rounding of a mean that should be 0."""
    found = advantages.reinforce_plus_plus_baseline(groups_of([[0.7], [0.1, 0.2, 0.4], [0.3, 0.9], [0.6, 0.6]]))
    assert (found[[0, 6, 7]] == 0).all() and (found[1:6] != 0).all()


@pytest.mark.parametrize(("gap", "zero"), [(1e-7, True), (1e-2, False)])
def test_rewards_within_the_tolerance_are_equal(gap, zero):
    """Differences below the tolerance are rounding, not signal; the tolerance is a parameter."""
    groups = groups_of([[0.5, 0.5 + gap]])
    assert (advantages.group_zscore(groups) == 0).all() == zero
    assert (advantages.group_zscore(groups, tolerance=0.1) == 0).all()


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.0)]))
def test_gae_equals_the_recursion(seed, discounts):
    """Each token's GAE is the backward recursion's: a cut response bootstraps with V, one that ended does not."""
    groups = critic_groups(np.random.default_rng(seed))
    found = advantages.gae(groups, *discounts)
    np.testing.assert_allclose(found, gae_by_recursion(groups, *discounts), rtol=1e-4, atol=1e-5)


def test_gae_by_hand():
    """Two tokens, reward 1 at the end, V 0.5, 0.25 and then 0.125: ended and cut, discount 0.9, lambda 0.5."""
    from algs.records import Groups

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
        np.testing.assert_allclose(advantages.gae(groups, discount=0.9, gae_lambda=0.5), expected, rtol=1e-6)


def test_gae_at_lambda_one_is_the_return_less_v():
    """With discount and lambda 1 and no cut, A_t + V_t is the sum of the rewards that follow."""
    groups = critic_groups(np.random.default_rng(5))
    rewards = groups.token_rewards.double().numpy()
    found = advantages.gae(groups, 1.0, 1.0).double().numpy() + groups.values.double().numpy()
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
    found = advantages.gae(groups, bootstrap_truncated=False)
    assert torch.equal(found, advantages.gae(ended))
    assert not torch.equal(found, advantages.gae(groups))


def test_gae_without_a_critic_is_refused_with_the_way_out():
    """Asked of groups without values it says that the method has no critic."""
    with pytest.raises(ValueError, match="critic"):
        advantages.gae(groups_of([[0.0, 1.0]]))


@settings(max_examples=30)
@given(st.lists(st.integers(-50, 50).map(lambda x: x / 10), min_size=2, max_size=30))
def test_whiten_gives_mean_0_and_deviation_1(values):
    """Whitened values have mean 0 and standard deviation 1 (n - 1), or are 0 when there is no spread; order is kept."""
    found = advantages.whiten(tensor(values)).double().numpy()
    if np.ptp(values) <= 1e-6:
        assert (found == 0).all()
    else:
        np.testing.assert_allclose([found.mean(), found.std(ddof=1)], [0, 1], atol=1e-4)
        assert (np.argsort(found, kind="stable") == np.argsort(values, kind="stable")).all()
