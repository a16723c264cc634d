"""GRPO against an independent float64 reading of arXiv 2402.03300, on random ragged groups."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algs.advantages import group_mean, group_zscore, varies
from algs.grpo import GRPO
from algs.records import Groups, PolicyTokens


def groups_of(rewards_by_group):
    flat = [reward for group in rewards_by_group for reward in group]
    index = [g for g, group in enumerate(rewards_by_group) for _ in group]
    return Groups(
        torch.tensor(flat, dtype=torch.float32), torch.tensor(index), torch.ones(len(flat), dtype=torch.int64)
    )


def tokens_of(seed, n, with_ref=False):
    rng = np.random.default_rng(seed)
    logprobs = torch.tensor(-rng.exponential(1.0, n), dtype=torch.float32, requires_grad=True)
    old = logprobs.detach() + torch.tensor(rng.normal(0, 0.4, n), dtype=torch.float32)
    sequences = max(1, n // 3)
    return PolicyTokens(
        logprobs=logprobs,
        behavior_logprobs=old,
        old_logprobs=old,
        advantages=torch.tensor(rng.normal(0, 1, n), dtype=torch.float32),
        entropy=torch.ones(n),
        sequence=torch.tensor(np.sort(rng.integers(0, sequences, n))),
        group=torch.zeros(sequences, dtype=torch.int64),
        staleness=torch.zeros(n, dtype=torch.int64),
        ref_logprobs=logprobs.detach() + torch.tensor(rng.normal(0, 0.5, n), dtype=torch.float32) if with_ref else None,
    )


def paper_loss(logp, old, ref, advantage, low, high, beta, estimator):
    """One token, in float64, from the formula."""
    ratio = math.exp(logp - old)
    surrogate = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    kl = 0.0
    if beta:
        d = logp - ref
        kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]
    return -(surrogate - beta * kl)


rewards = st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=9)


@settings(max_examples=60)
@given(st.lists(rewards, min_size=1, max_size=6))
def test_advantages_equal_numpy_on_ragged_groups(by_group):
    found = group_zscore(groups_of(by_group)).double().numpy()
    position = 0
    for group in by_group:
        r = np.array(group, dtype=np.float64)
        expected = np.zeros_like(r)
        if len(r) > 1 and np.ptp(r) > 1e-6:
            expected = (r - r.mean()) / (r.std(ddof=1) + 1e-6)
        np.testing.assert_allclose(found[position : position + len(r)], expected, rtol=2e-3, atol=2e-3)
        position += len(r)


def test_one_of_eight_correct_has_the_published_advantage():
    groups = groups_of([[1] + [0] * 7, [1] * 2 + [0] * 6])
    assert group_zscore(groups)[0].item() == pytest.approx(2.475, abs=1e-3)
    assert group_mean(groups)[0].item() == pytest.approx(0.875)


@pytest.mark.parametrize("value", [0.1, 0.9, 1 / 3, 1e6])
@pytest.mark.parametrize("size", [1, 2, 7, 8])
def test_equal_rewards_give_exactly_zero(value, size):
    groups = groups_of([[value] * size, [0.0, 1.0]])
    assert (group_zscore(groups)[:size] == 0).all()
    assert varies(groups).tolist() == [False, True]


@settings(max_examples=30)
@given(
    st.integers(0, 10**6),
    st.integers(1, 20),
    st.sampled_from([0.0, 0.04, 1.0]),
    st.sampled_from(["k1", "k2", "k3"]),
    st.sampled_from([(0.2, 0.2), (0.2, 0.28), (0.0, 0.0), (0.9, 5.0)]),
)
def test_loss_equals_the_paper(seed, n, beta, estimator, clip):
    t = tokens_of(seed, n, with_ref=beta > 0)
    method = GRPO(GRPO.Params(clip_low=clip[0], clip_high=clip[1], kl_coef=beta, kl_estimator=estimator))
    found = method.loss(t).values.detach().double().numpy()
    ref = t.ref_logprobs if t.ref_logprobs is not None else t.old_logprobs
    expected = [
        paper_loss(*map(float, row), *clip, beta, estimator)
        for row in zip(t.logprobs, t.old_logprobs, ref, t.advantages, strict=True)
    ]
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradient_equals_finite_differences(estimator):
    t = tokens_of(7, 40, with_ref=True)
    method = GRPO(GRPO.Params(kl_coef=0.1, kl_estimator=estimator))
    (gradient,) = torch.autograd.grad(method.loss(t).values.sum(), t.logprobs)
    h = 1e-6
    for i in range(40):
        row = [float(x[i]) for x in (t.logprobs, t.old_logprobs, t.ref_logprobs, t.advantages)]
        up = paper_loss(row[0] + h, *row[1:], 0.2, 0.2, 0.1, estimator)
        down = paper_loss(row[0] - h, *row[1:], 0.2, 0.2, 0.1, estimator)
        assert gradient[i].item() == pytest.approx((up - down) / (2 * h), rel=1e-3, abs=1e-4)


def test_weight_on_the_gradient_outside_the_clip_range():
    """METHODS: at A = +1 and r = 6 the weight on grad log pi is 0; at A = -1 and r = 6 it is -6."""
    for advantage, weight in ((1.0, 0.0), (-1.0, -6.0)):
        t = tokens_of(0, 1)
        logprobs = torch.tensor([-1.0], requires_grad=True)
        old = torch.tensor([-1.0 - math.log(6)])
        t = PolicyTokens(logprobs, old, old, torch.tensor([advantage]), torch.ones(1), t.sequence, t.group, t.staleness)
        (gradient,) = torch.autograd.grad(GRPO(GRPO.Params()).loss(t).values.sum(), logprobs)
        assert -gradient.item() == pytest.approx(weight, abs=1e-5)


def test_the_reference_is_asked_for_only_with_a_kl_term():
    assert GRPO(GRPO.Params()).needs() == frozenset()
    assert GRPO(GRPO.Params(kl_coef=0.1)).needs() == {"ref_logprobs"}


def test_clip_fraction_counts_tokens_without_gradient():
    t = tokens_of(3, 200)
    answer = GRPO(GRPO.Params()).loss(t)
    (gradient,) = torch.autograd.grad(answer.values.sum(), t.logprobs)
    assert answer.metrics["clip_fraction"].sum().item() == (gradient == 0).sum().item() > 0
