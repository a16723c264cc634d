"""The known traps of these objectives, each with the numbers that show it is avoided.

Trap 8 (what the aggregations do to long prompts) is in test_aggregation.py; traps 6 and 10 (weights far outside the
trust region, dual clip) are rows of test_algs.py and test_ppo.py.
"""

import dataclasses
import math
from statistics import NormalDist

import numpy as np
import pytest
import torch

from algs.introspection.method_facts import differentiates, reads
from algs.parts import kl
from plugins.kinds import listed
from unit_tests.algs.method_checks import (
    NAMES,
    gradient,
    groups_of,
    inseparable,
    make,
    one_token,
    policy_tokens,
    random_pairs,
    random_step,
    weight,
)
from unit_tests.algs.reference import Step

STEP = random_step([3, 2, 4], [4, 1, 7, 2, 5, 3, 3, 6, 2], np.random.default_rng(3))
PAIRS = random_pairs([4, 1, 7, 2, 5, 3], np.random.default_rng(3))


def step_for(name):
    return PAIRS if make(name).data == "pairs" else STEP


# Trap 2: the KL to mu, on tokens sampled from mu. The expectation over mu is taken exactly, over a vocabulary of five.

PI = np.array([0.3, -1.0, 0.7, 1.5, -0.4])
MU = np.log(np.array([0.4, 0.1, 0.25, 0.05, 0.2]))


def expected_gradient(per_token):
    """Of sum_x mu(x) per_token(log pi(x), log mu(x)) in the logits of pi, float64."""
    logits, log_mu = torch.tensor(PI, requires_grad=True), torch.tensor(MU)
    terms = per_token(torch.log_softmax(logits, 0), log_mu)
    return torch.autograd.grad((log_mu.exp() * terms).sum(), logits)[0].numpy()


def true_gradient(direction):
    """Of the KL divergence itself, from its definition."""
    logits, log_mu = torch.tensor(PI, requires_grad=True), torch.tensor(MU)
    log_pi = torch.log_softmax(logits, 0)
    first, second = (log_pi, log_mu) if direction == "reverse" else (log_mu, log_pi)
    return torch.autograd.grad((first.exp() * (first - second)).sum(), logits)[0].numpy()


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_trap_2_p3os_kl_term_has_its_divergences_gradient(direction):
    """P3O's KL term, averaged over tokens sampled from mu, has (1 − ESS) times the gradient of the KL it is named for."""
    method = make("p3o", kl_direction=direction)

    def per_token(log_pi, log_mu):
        t = dataclasses.replace(
            policy_tokens(one_token(0.0, 1.0), method),
            logprobs=log_pi,
            behavior_logprobs=log_mu,
            advantages=torch.zeros(5, dtype=torch.float64),
            update_sums={"rho": torch.tensor(6.0), "rho_squared": torch.tensor(6.0), "tokens": torch.tensor(8.0)},
        )
        return method.loss(t).loss

    found = expected_gradient(per_token)
    np.testing.assert_allclose(found, (1 - 0.75) * true_gradient(direction), rtol=1e-5, atol=1e-8)


def test_trap_2_the_other_estimators_do_not():
    """On tokens from mu, log(rho) pushes the forward KL up, and k3 with mu as the reference has neither gradient."""
    np.testing.assert_allclose(expected_gradient(lambda p, m: p - m), -true_gradient("forward"), rtol=1e-9)
    k3 = expected_gradient(lambda p, m: kl.estimate("k3", p, m))
    for direction in ("reverse", "forward"):
        assert np.abs(k3 - true_gradient(direction)).max() > 0.1


@pytest.mark.parametrize("log_ratio", [-80.0, -30.0, -11.0, 11.0, 30.0, 80.0])
def test_trap_3_k3_pulls_the_right_way_at_any_distance(log_ratio):
    """The gradient of k3 has the sign of log(pi/ref) far beyond where peers clamp it, and is finite."""
    logprobs = torch.tensor([log_ratio], requires_grad=True)
    (slope,) = torch.autograd.grad(kl.estimate("k3", logprobs, torch.zeros(1)).sum(), logprobs)
    assert torch.isfinite(slope) and torch.sign(slope).item() == math.copysign(1, log_ratio)


@pytest.mark.parametrize("log_ratio", [-100.0, 45.0, 100.0, 1000.0])
@pytest.mark.parametrize("name", sorted(listed("method")))
def test_trap_3_a_log_ratio_of_100_overflows_no_method(name, log_ratio):
    """exp(100) is Inf in float32, and times a clipped token's 0 it was NaN. Loss, metrics and gradient are finite, and
    so is the gradient's norm, for one such token of 33 and for all, of either sign of the advantage."""
    step = step_for(name)
    for where in (np.arange(len(step.logp)) == 5, step.logp < 0):
        far = step.logp - np.where(where, log_ratio, 0)
        for sign in (-1.0, 1.0):
            changed = {"advantage": sign * np.ones_like(far), "ref": far}
            for against in ({"old": far, "mu": far}, {"old": far}, {"mu": far}):
                for params in [{}, {"dual_clip": None}][: 1 + hasattr(make(name).params, "dual_clip")]:
                    method = make(name, **params)
                    t = policy_tokens(dataclasses.replace(step, **changed, **against), method)
                    answer = method.loss(t)
                    total = answer.loss.sum() + (0 if answer.critic is None else answer.critic.sum())
                    slopes = torch.autograd.grad(total, (t.logprobs, t.values), allow_unused=True)
                    assert torch.isfinite(answer.loss).all()
                    assert all(torch.isfinite(m.float()).all() for m in answer.metrics.values()), answer.metrics
                    assert all(torch.isfinite(s).all() and torch.isfinite(s.norm()) for s in slopes if s is not None)


@pytest.mark.parametrize("name", sorted(listed("method")))
def test_trap_3_one_far_token_does_not_outweigh_all_others(name):
    """In a step of 1000 tokens, one with log r = 10 and A = -1 had 697 times the gradient of all others together."""
    rng = np.random.default_rng(0)
    step = random_step([4] * 5, [50] * 20, rng) if make(name).data != "pairs" else random_pairs([50] * 20, rng)
    step.advantage[:] = np.where(np.arange(1000) % 2, 1.0, -1.0)
    for column in (step.old, step.mu):
        column[:] = step.logp - rng.normal(0, 0.1, 1000)
        column[500] = step.logp[500] - 10
    found = gradient(make(name), step) if name != "reward_model" else np.ones(1000)
    if name == "p3o":  # the exact gradient of its KL to mu, which it has in place of a clip
        return
    if name == "ppo":  # as in the paper, whose text has no bound there
        assert abs(found[500]) > 100 * np.linalg.norm(np.delete(found, 500))
        found = gradient(make("ppo", dual_clip=3.0), step)
    elif name == "gspo":  # the response's mean, 0.2 nats, is what counts
        assert abs(found[500]) < 1.3
    assert abs(found[500]) <= np.linalg.norm(np.delete(found, 500))


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_trap_4_a_non_finite_logprob_is_never_laundered(name, bad):
    """A NaN log-probability makes its token's loss NaN for the trainer to see; one of −Inf does too, or has no gradient.

    A reward model reads no log-probability: of it the same is asked of a score.
    """
    step = step_for(name)
    step = dataclasses.replace(
        step, logp=step.logp.copy(), value=step.value.copy(), advantage=np.ones_like(step.advantage)
    )
    at, method = step.slices[2][-1], make(name)
    of_scores = "logprobs" not in differentiates(method)
    (step.value if of_scores else step.logp)[at] = bad
    t = policy_tokens(step, method)
    values = method.loss(t).loss
    (slope,) = torch.autograd.grad(values.sum(), t.values if of_scores else t.logprobs)
    if math.isnan(bad):
        assert torch.isnan(values[at])
    else:
        assert not torch.isfinite(values[at]) or slope[at] == 0


def mu_shifted(deviation, n=20_001):
    """A step whose log rho takes the quantiles of N(0, deviation²)."""
    quantiles = np.array([NormalDist().inv_cdf((i + 0.5) / n) for i in range(n)]) * deviation
    zeros = np.zeros(n)
    return Step([n], [0], zeros - 1, zeros - 1, -1 - quantiles, zeros, zeros + 1, zeros, zeros, zeros)


@pytest.mark.parametrize(("deviation", "expected"), [(0.0, 1.0), (0.1, 0.990), (0.5, 0.779), (1.0, 0.368)])
def test_trap_5_effective_sample_size_of_a_normal_log_ratio(deviation, expected):
    """With log rho ~ N(0, s²), P3O's ESS is exp(−s²): 0.990, 0.779, 0.368 for s = 0.1, 0.5, 1."""
    method = make("p3o")
    answer = method.loss(policy_tokens(mu_shifted(deviation), method))
    ess = answer.metrics["ess"]
    assert (ess == ess[0]).all() and ess[0].item() == pytest.approx(expected, abs=6e-3)
    assert expected == pytest.approx(math.exp(-(deviation**2)), abs=5e-4)


@pytest.mark.parametrize("shift", [0.0, 1.0])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_trap_5_at_ess_1_the_gradient_is_reinforces(direction, shift):
    """At ESS 1 (all rho equal, here 1 or e) P3O has REINFORCE's gradient: the cap is 1, not 1e-7, and the KL is off."""
    step = dataclasses.replace(STEP, mu=STEP.logp - shift)
    expected = gradient(make("reinforce"), step)
    np.testing.assert_allclose(gradient(make("p3o", kl_direction=direction), step), expected, rtol=1e-4, atol=1e-5)
    assert np.abs(expected).max() > 0.5


@pytest.mark.parametrize("name", NAMES)
def test_trap_7_no_method_counts_mu_twice_by_itself(name):
    """With pi = pi_old and rho = pi / mu below 1, a token weighs rho at the least; given responses have no mu at all."""
    method = make(name)
    if method.data != "prompts":
        assert not reads(method) & {"behavior_logprobs", "old_logprobs"}
        return
    for advantage in (1, -1):
        found = weight(method, advantage, 1, behavior_ratio=0.9) / weight(method, advantage, 1)
        assert 0.9 - 1e-4 <= found <= 1 + 1e-4


@pytest.mark.parametrize(
    ("name", "expected"), [("grpo", 2.475), ("lite_ppo", 1.764), ("scale_rl", 2.160), ("rloo", 1.000)]
)
def test_trap_9_one_of_eight_correct(name, expected):
    """In a batch of groups with 1, 2, 4, 7 of 8 correct, the one that got it right alone has the published advantage."""
    groups = groups_of([[1.0] * right + [0.0] * (8 - right) for right in (1, 2, 4, 7)])
    assert make(name).advantages(groups)[0].item() == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_trap_14_metrics_add_up_over_micro_batches(name):
    """Every metric is one number per token (response or pair, for a method that learns from preferences), so that its sum
    and count over the step are the same however the step is cut."""
    method, step, together = make(name), step_for(name), inseparable(name, step_for(name))
    whole = method.loss(policy_tokens(step, method)).metrics
    chosen = [[i for unit in part for i in unit] for part in (together[:1], together[1:2], together[2:])]
    parts = [method.loss(policy_tokens(step, method, part)).metrics for part in chosen]
    for key, values in whole.items():
        total = sum(part[key].double().sum().item() for part in parts)
        if method.data == "prompts":
            assert values.shape == step.logp.shape
        assert sum(part[key].numel() for part in parts) == values.numel() > 0
        assert total == pytest.approx(values.double().sum().item(), rel=1e-5, abs=1e-5), key
