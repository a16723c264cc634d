"""What every method's tests share: random ragged steps, and the comparison of a method with its float64 reference."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

import algs
from algs.method import PolicyMethod
from algs.records import Groups, PolicyTokens
from plugins.kinds import find
from unit_tests.algs import reference
from unit_tests.algs.reference import Array, Ragged, Step


def holds_a_method(path: Path) -> bool:
    module = importlib.import_module(f"algs.{path.stem}")
    found = [x for x in vars(module).values() if inspect.isclass(x) and issubclass(x, PolicyMethod)]
    return any(x.__module__ == module.__name__ and x is not PolicyMethod for x in found)


NAMES = sorted(path.stem for path in Path(algs.__file__).parent.glob("*.py") if holds_a_method(path))


def make(name: str, **params: Any) -> PolicyMethod:
    """The method of algs/<name>.py under these parameters, the rest at their defaults."""
    method = find("method", name)
    return method(method.Params(**params))


def exact(x: Any) -> Array:
    """Float64 values that float32 holds exactly, so that both sides begin from the same numbers."""
    return np.asarray(x, dtype=np.float32).astype(np.float64)


@st.composite
def steps(draw: st.DrawFn, max_groups: int = 4, max_size: int = 6, max_length: int = 9) -> Step:
    """Ragged groups; log-ratios spread with standard deviation 0.5, one in ten up to 4 away; advantages 0 in places."""
    sizes = draw(st.lists(st.integers(1, max_size), min_size=1, max_size=max_groups))
    lengths = [draw(st.integers(1, max_length)) for _ in range(sum(sizes))]
    by_token = draw(st.booleans())
    return random_step(sizes, lengths, np.random.default_rng(draw(st.integers(0, 2**32))), by_token)


@st.composite
def pair_steps(draw: st.DrawFn, max_pairs: int = 5, max_length: int = 9) -> Step:
    """Pairs of one chosen and one rejected response each, in any order."""
    pairs = draw(st.integers(1, max_pairs))
    lengths = [draw(st.integers(1, max_length)) for _ in range(2 * pairs)]
    return random_pairs(lengths, np.random.default_rng(draw(st.integers(0, 2**32))))


def steps_for(name: str, **limits: int) -> st.SearchStrategy[Step]:
    """Random steps of the kind of data that the method learns from."""
    return pair_steps() if find("method", name).data == "pairs" else steps(**limits)


def random_pairs(lengths: list[int], rng: np.random.Generator) -> Step:
    step = random_step([2] * (len(lengths) // 2), lengths, rng)
    first = [step.group.index(g) == i for i, g in enumerate(step.group)]
    is_first_chosen = rng.random(len(lengths) // 2) < 0.5
    chosen = [bool(f == is_first_chosen[g]) for f, g in zip(first, step.group, strict=True)]
    return dataclasses.replace(step, chosen=chosen)


def inseparable(name: str, step: Step) -> list[list[int]]:
    """The trajectories that must be in one micro-batch: the two of a pair, else each by itself."""
    if find("method", name).data != "pairs":
        return [[i] for i in range(len(step.lengths))]
    return [[i for i, g in enumerate(step.group) if g == group] for group in sorted(set(step.group))]


def random_step(sizes: list[int], lengths: list[int], rng: np.random.Generator, by_token: bool = False) -> Step:
    n = sum(lengths)
    group = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    advantage = rng.normal(0, 1.5, n if by_token else len(lengths)) * rng.choice(
        [1, 1, 1, 0], n if by_token else len(lengths)
    )
    logp = exact(-rng.exponential(1.0, n) - 1e-3)
    old = exact(logp - log_ratios(rng, n))
    value = exact(rng.normal(0, 1, n))
    return Step(
        lengths=lengths,
        group=group.tolist(),
        logp=logp,
        old=old,
        mu=exact(old - log_ratios(rng, n) * 0.6),
        ref=exact(logp - log_ratios(rng, n)),
        advantage=exact(advantage if by_token else np.repeat(advantage, lengths)),
        value=value,
        old_value=exact(value + rng.normal(0, 0.3, n)),
        returns=exact(rng.normal(0, 1, n)),
        chosen=(rng.random(len(lengths)) < 0.5).tolist(),
    )


def log_ratios(rng: np.random.Generator, n: int) -> Array:
    return rng.normal(0, 0.5, n) + rng.uniform(-4, 4, n) * (rng.random(n) < 0.1)


def one_token(advantage: float, ratio: float, behavior_ratio: float = 1.0) -> Step:
    """A step of one token: pi/pi_old = ratio, pi_old/mu = behavior_ratio."""
    one = np.ones(1)
    old = -1.0 - np.log(ratio) * one
    return Step([1], [0], -one, old, old - np.log(behavior_ratio), -one, advantage * one, 0 * one, 0 * one, 0 * one)


def tensor(x: Array) -> torch.Tensor:
    return torch.tensor(np.asarray(x), dtype=torch.float32)


def policy_tokens(step: Step, method: PolicyMethod, part: list[int] | None = None) -> PolicyTokens:
    """The tokens of the trajectories in `part`, in that order (default: all), with the sums over the whole step."""
    whole = _tokens(step, list(range(len(step.lengths))))
    sums = {name: x.detach().double().sum().float() for name, x in method.update_sums(whole).items()}
    return dataclasses.replace(whole if part is None else _tokens(step, part), update_sums=sums)


def _tokens(step: Step, part: list[int]) -> PolicyTokens:
    index = positions(step, part)
    return PolicyTokens(
        logprobs=tensor(step.logp[index]).requires_grad_(),
        behavior_logprobs=tensor(step.mu[index]),
        old_logprobs=tensor(step.old[index]),
        advantages=tensor(step.advantage[index]),
        entropy=torch.ones(len(index)),
        sequence=torch.repeat_interleave(
            torch.arange(len(part)), torch.tensor([step.lengths[i] for i in part], dtype=torch.int64)
        ),
        group=torch.tensor([step.group[i] for i in part], dtype=torch.int64),
        staleness=torch.zeros(len(index), dtype=torch.int64),
        ref_logprobs=tensor(step.ref[index]),
        values=tensor(step.value[index]).requires_grad_(),
        old_values=tensor(step.old_value[index]),
        returns=tensor(step.returns[index]),
        chosen=torch.tensor([step.chosen[i] for i in part], dtype=torch.bool) if step.chosen else None,
    )


def positions(step: Step, part: list[int]) -> Array:
    """Positions in the step's [N] arrays of the tokens of these trajectories."""
    return np.array([i for trajectory in part for i in step.slices[trajectory]], dtype=np.int64)


def gradient(method: PolicyMethod, step: Step, weights: Array | None = None) -> Array:
    """Of sum(weights * loss) in the log-probabilities, [N]; weights default to 1."""
    t = policy_tokens(step, method)
    values = method.loss(t).loss
    (found,) = torch.autograd.grad(
        values @ (torch.ones_like(values) if weights is None else tensor(weights)), t.logprobs
    )
    return found.double().numpy()


def weight(method: PolicyMethod, advantage: float, ratio: float, behavior_ratio: float = 1.0) -> float:
    """The weight on grad log pi of a token with this advantage and ratio: minus the loss's derivative in log pi."""
    return -gradient(method, one_token(advantage, ratio, behavior_ratio)).item()


def check_values(name: str, reference: Any, step: Step, **params: Any) -> None:
    """The per-token loss is the reference's, and everything in the answer has a token's shape."""
    method = make(name, **params)
    answer = method.loss(policy_tokens(step, method))
    expected = np.array(reference(step, step.logp, step.logp, **params))
    assert answer.loss.dtype == torch.float32 and answer.loss.shape == (len(step.logp),)
    np.testing.assert_allclose(answer.loss.detach().double().numpy(), expected, rtol=2e-5, atol=2e-5)
    entries = {
        len(step.logp),
        len(step.lengths),
        len(set(step.group)),
        sum(step.chosen),
        sum(not c for c in step.chosen),
    }
    of_rl = {len(step.logp)}
    assert {m.numel() for m in answer.metrics.values()} <= (of_rl if make(name).data == "prompts" else entries)
    assert all(torch.isfinite(m.float()).all() for m in answer.metrics.values())


def check_gradient(name: str, reference: Any, step: Step, **params: Any) -> None:
    """The gradient is the reference's central finite difference, where its left and right differences agree.

    The loss is weighted by a random factor per trajectory, as aggregation does.
    """
    weights = np.repeat(exact(np.random.default_rng(0).uniform(0.2, 2, len(step.lengths))), step.lengths)
    found = gradient(make(name, **params), step, weights)
    h, checked = 1e-5, 0
    middle = weights @ reference(step, step.logp, step.logp, **params)
    for i in range(len(step.logp)):
        nudge = np.zeros_like(step.logp)
        nudge[i] = h
        up = weights @ reference(step, step.logp + nudge, step.logp, **params)
        down = weights @ reference(step, step.logp - nudge, step.logp, **params)
        slope = (up - down) / (2 * h)
        if abs((up - middle) - (middle - down)) / h > 2e-4 * (1 + abs(slope)):
            continue  # a kink of a clip: no derivative to compare with
        np.testing.assert_allclose(found[i], slope, rtol=5e-4, atol=5e-4)
        checked += 1
    assert checked >= len(step.logp) - 2, "nearly every token must be away from a kink"


def groups_of(rewards: Ragged, order: Array | None = None) -> Groups:
    """Rewards by group as the record an advantage sees, trajectories in `order` (default: group after group)."""
    group = np.repeat(np.arange(len(rewards)), [len(g) for g in rewards])
    flat = np.array([r for g in rewards for r in g])
    order = np.arange(len(flat)) if order is None else order
    return Groups(tensor(flat[order]), torch.tensor(group[order]), torch.ones(len(flat), dtype=torch.int64))


ragged_rewards = st.lists(
    st.lists(st.sampled_from([0.0, 1.0, 1.0, -0.5, 0.25, 0.1, 3.0]), min_size=1, max_size=6), min_size=1, max_size=6
)


def check_advantage(advantage: Any, reference: Any, rewards: Ragged, seed: int = 0) -> None:
    """The advantage of each trajectory is the reference's, in whatever order the trajectories lie."""
    rewards = [exact(g).tolist() for g in rewards]
    order = np.random.default_rng(seed).permutation(sum(len(g) for g in rewards))
    found = advantage(groups_of(rewards, order))
    assert found.dtype == torch.float32
    expected = np.array([a for g in reference(rewards) for a in g])[order]
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=2e-4, atol=2e-5)


def critic_groups(rng: np.random.Generator) -> Groups:
    """A step with a critic: up to 8 responses of 0 to 7 tokens, some cut at the length limit."""
    lengths = rng.integers(0, 8, rng.integers(1, 9))
    lengths[0] = max(lengths[0], 1)
    s, n = len(lengths), int(lengths.sum())
    return Groups(
        rewards=tensor(rng.normal(0, 1, s)),
        group=torch.tensor(np.sort(np.unique(rng.integers(0, 3, s), return_inverse=True)[1])),
        lengths=torch.tensor(lengths),
        truncated=torch.tensor(rng.random(s) < 0.5),
        token_rewards=tensor(rng.normal(0, 1, n)),
        values=tensor(rng.normal(0, 1, n)),
        final_values=tensor(rng.normal(0, 1, s)),
    )


def gae_by_recursion(groups: Groups, discount: float, gae_lambda: float) -> Array:
    """reference.gae of each response, one after the other, [N]."""
    rewards, values = groups.token_rewards.double().tolist(), groups.values.double().tolist()
    out, start = [], 0
    for i, length in enumerate(groups.lengths.tolist()):
        part = slice(start, start + length)
        final, cut = groups.final_values[i].item(), bool(groups.truncated[i])
        out += reference.gae(rewards[part], values[part], final, cut, discount, gae_lambda)
        start += length
    return np.array(out)
