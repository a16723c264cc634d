"""Advantages against explicit loops over groups and tokens, and what they promise at the edges."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algs import advantages
from algs.records import Groups
from algs.reinforce_plus_plus import ReinforcePlusPlus
from unit_tests.algs import reference
from unit_tests.algs.method_checks import (
    check_advantage,
    exact,
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


def test_whitening_far_from_0_loses_no_digits():
    """Rewards of 1000 +- 1e-3 have a mean that float32 rounds by more than a hundredth of their spread."""
    x = torch.tensor([1000.0, 1000.001, 1000.002, 999.999, 1000.0015, 1000.0005, 999.9985])
    expected = (x.double() - x.double().mean()) / x.double().std()
    found = advantages.whiten(x)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert abs(found.double().mean().item()) < 1e-6


def test_zscore_adds_its_epsilon_to_the_deviation_and_not_to_the_variance():
    """Rewards 1e-5 apart: std 7.07e-6 + 1e-6 gives 0.619; 1e-6 squared inside the root would give 0.700."""
    found = advantages.group_zscore(groups_of([[0.0, 1e-5]]))
    assert found.tolist() == pytest.approx([-0.6194, 0.6194], abs=1e-3)


@pytest.mark.parametrize(("gap", "zero"), [(0.5, True), (0.5 + 2**-20, False)])
def test_rewards_that_differ_by_exactly_the_tolerance_are_equal(gap, zero):
    """No more than the tolerance counts as equal: the bound itself is in."""
    assert (advantages.group_zscore(groups_of([[0.0, gap]]), tolerance=0.5) == 0).all() == zero


def penalised(seed: int) -> tuple[Groups, list[list[float]]]:
    """Groups of three and four responses of 1 to 5 tokens with a penalty on each token, and the rewards from each on."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 6, 7)
    tokens = [exact(random.normal(0, 0.3, n)) for n in lengths]
    for own in tokens:
        own[-1] += random.integers(0, 2)
    to_go = [np.cumsum(own[::-1])[::-1].tolist() for own in tokens]
    groups = Groups(
        rewards=tensor(np.array([own[0] for own in to_go])),
        group=torch.tensor([0, 0, 0, 1, 1, 1, 1]),
        lengths=torch.tensor(lengths),
        token_rewards=tensor(np.concatenate(tokens)),
    )
    return groups, to_go


@pytest.mark.parametrize("seed", range(5))
def test_with_a_penalty_on_tokens_each_has_the_rewards_from_itself_on(seed):
    """RLOO takes the others' whole reward off them; REINFORCE++ whitens them as the responses, or all of them as the
    authors' code does (OpenRLHF, verl: masked_whiten of the returns)."""
    groups, to_go = penalised(seed)
    whole = [own[0] for own in to_go]
    others = [np.mean([whole[j] for j in own if j != i]) for own in ((0, 1, 2), (3, 4, 5, 6)) for i in own]
    expected = [r - b for own, b in zip(to_go, others, strict=True) for r in own]
    np.testing.assert_allclose(advantages.rloo(groups), expected, rtol=1e-4, atol=1e-5)
    flat = np.concatenate(to_go)
    np.testing.assert_allclose(
        advantages.reinforce_plus_plus(groups), (flat - np.mean(whole)) / np.std(whole, ddof=1), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        advantages.reinforce_plus_plus(groups, over="tokens"),
        (flat - flat.mean()) / flat.std(ddof=1),
        rtol=1e-4,
        atol=1e-5,
    )


def test_over_tokens_a_long_response_counts_more():
    """Without penalties: rewards 1 and 0 of three tokens and one have the mean 3/4, not 1/2."""
    groups = Groups(tensor([1.0, 0.0]), torch.tensor([0, 1]), torch.tensor([3, 1]))
    found = advantages.reinforce_plus_plus(groups, over="tokens")
    np.testing.assert_allclose(found, np.array([0.25, 0.25, 0.25, -0.75]) / 0.5, rtol=1e-5)
    method = ReinforcePlusPlus(ReinforcePlusPlus.Params(normalise_over="tokens"))
    assert torch.equal(method.advantages(groups), found)


def test_a_group_of_one_learns_nothing_from_its_penalties_under_rloo():
    groups = Groups(tensor([0.7]), torch.tensor([0]), torch.tensor([3]), token_rewards=tensor([-0.1, -0.2, 1.0]))
    assert not advantages.rloo(groups).any()
