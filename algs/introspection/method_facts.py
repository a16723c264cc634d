"""Find out what a method or correction does by running it on made-up tokens, so that its author need not declare it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from algs.method import PolicyMethod
from algs.records import Correction, Groups, PolicyTokens

READABLE = ("old_logprobs", "behavior_logprobs", "ref_logprobs", "values", "advantages")
DIFFERENTIABLE = ("logprobs", "entropy", "values")  # the model's outputs
LENGTHS = (4, 1, 5, 2, 3, 1)  # action tokens of the made-up responses
GROUPS = (0, 0, 1, 1, 2, 2)
# Not every method gets these fields. An optional field that is added to PolicyTokens is among them without an edit
# here.
OPTIONAL = tuple(f.name for f in dataclasses.fields(PolicyTokens) if f.default is None and f.name != "chosen")
CHOSEN = (True, False, False, True, True, False)  # one of each group, so that each group is a pair too


def made_up_tokens(lengths: tuple[int, ...] = LENGTHS) -> PolicyTokens:
    """Return the tokens of six responses in three groups, with every optional field; the same at every call.

    Ratios run from exp(-4) to exp(4), far on both sides of any usual clip; advantages have both signs. Each group is a
    pair, for methods that learn from preferences; for methods that learn from labels, each response has its own label.
    """
    n = sum(lengths)
    random = torch.Generator().manual_seed(0)

    def draw(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(n, generator=random)

    logprobs = draw(-6, -4)
    values = draw(-1, 1)
    tokens = PolicyTokens(
        logprobs=logprobs,
        behavior_logprobs=logprobs + draw(-4, 4),
        old_logprobs=logprobs + draw(-4, 4),
        advantages=draw(-2, 2),
        entropy=draw(0.1, 2),
        sequence=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        group=torch.tensor(GROUPS),
        staleness=torch.arange(n) % 3,
        ref_logprobs=logprobs + draw(-4, 4),
        values=values,
        old_values=values + draw(-0.5, 0.5),
        chosen=torch.tensor(CHOSEN),
    )
    others: dict[str, Any] = {name: draw(-1, 1) for name in OPTIONAL if getattr(tokens, name) is None}
    return dataclasses.replace(tokens, **others)


def made_up_groups(sizes: tuple[int, ...], with_critic: bool) -> Groups:
    """Return groups of the given sizes whose rewards all differ, with a critic's fields if `with_critic`."""
    responses = sum(sizes)
    random = torch.Generator().manual_seed(0)
    lengths = torch.arange(responses) % 3 + 1
    n = int(lengths.sum())
    rewards = (torch.randperm(responses, generator=random) + 1) / responses
    token_rewards = torch.zeros(n)
    token_rewards[lengths.cumsum(0) - 1] = rewards
    return Groups(
        rewards=rewards,
        group=torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)),
        lengths=lengths,
        truncated=torch.arange(responses) % 2 == 1,
        token_rewards=token_rewards,
        values=torch.rand(n, generator=random) if with_critic else None,
        final_values=torch.rand(responses, generator=random) if with_critic else None,
    )


def ignores_scale_of_a_group(advantage: Callable[[Groups], Tensor], with_critic: bool = False) -> bool:
    """Return whether multiplying all rewards of one group changes no advantage, as with a division by std_g."""
    groups = made_up_groups((4, 1, 3), with_critic)
    factor = 4.0**groups.group  # [S]
    assert groups.token_rewards is not None
    scaled = dataclasses.replace(
        groups, rewards=factor * groups.rewards, token_rewards=factor[groups.sequence] * groups.token_rewards
    )
    return torch.allclose(advantage(groups), advantage(scaled), rtol=1e-3, atol=1e-4)


def caps_its_ratio(method: PolicyMethod) -> bool:
    """Return whether the weight of a token grows with the ratio up to a cap, and stays there, for both signs of the
    advantage: a truncated importance weight. Past a clip or in the flat part of a gate, a token has no weight left."""
    far = torch.tensor([-8.0, 8.0, 16.0])
    weights = [sign * gradient_weight(method, far, sign) for sign in (1.0, -1.0)]
    return all(bool(0 <= w[0] < w[1]) and math.isclose(w[1], w[2], rel_tol=1e-3) for w in weights)


def ignores_zero_advantage(method: PolicyMethod) -> bool:
    """Return whether a token with advantage 0 gives no gradient under this method and its parameters.

    A KL term acts on every token, and so does a critic's loss: then no token may be left out of the forward pass.
    """
    tokens = made_up_tokens()
    tokens = dataclasses.replace(tokens, advantages=torch.zeros_like(tokens.advantages))
    _, gradients = _losses_and_filled_gradients(method, tokens)
    return not gradients.any()


def reads(method: PolicyMethod) -> frozenset[str]:
    """Return which of `READABLE` change the method's loss, or its gradient, when they vary."""
    tokens = made_up_tokens()
    before = _losses_and_filled_gradients(method, tokens)
    names = set()
    for name in READABLE:
        values = getattr(tokens, name)
        # Each token moves by another amount, so that no sum or mean over tokens stays where it was.
        moved = dataclasses.replace(tokens, **{name: values + torch.linspace(-0.7, 0.9, len(values))})
        after = _losses_and_filled_gradients(method, moved)
        if any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)):
            names.add(name)
    return frozenset(names)


def differentiates(method: PolicyMethod) -> frozenset[str]:
    """Return which of `DIFFERENTIABLE` are in the graph of the method's loss, even with a gradient of 0."""
    _, gradients = _losses_and_gradients(method, made_up_tokens())
    return frozenset(name for name, gradient in gradients.items() if gradient is not None)


def gradient_weight(method: PolicyMethod, log_ratio: Tensor, advantage: Tensor | float) -> Tensor:
    """Return -dL/dlog pi, the weight on grad log pi, of one-token responses with pi_old = mu = pi / ratio, [N].

    Sums over the update (P3O's effective sample size) are taken over the given tokens.

    Args:
        log_ratio: [N] floating, log(pi / pi_old).
        advantage: [N], or one number for all.
    """
    old = -1 - log_ratio.clamp(min=0)  # both stay below 0, as log-probabilities are
    tokens = _single_tokens(old + log_ratio, old, torch.arange(len(log_ratio)))
    return _weights(method, dataclasses.replace(tokens, advantages=torch.zeros_like(log_ratio) + advantage))


def pair_weights(method: PolicyMethod, margin: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights on grad log pi of the chosen and the rejected response of each pair. [P] -> [P], [P]

    The responses have one token each, and their log-ratios to the reference differ by `margin`. A weight is -dL/dlog
    pi, where L is the mean over pairs times their number. The more probable response of a pair has log pi = -1, and log
    pi_ref of both is -1. For a method that scores responses with a value head, it is the weight on the score's
    gradient, for scores of +- margin / 2.
    """
    pairs = len(margin)
    logprobs = torch.cat([-1 + margin.clamp(max=0), -1 - margin.clamp(min=0)])
    tokens = _single_tokens(logprobs, torch.full_like(logprobs, -1.0), torch.arange(pairs).repeat(2))
    tokens = dataclasses.replace(
        tokens, values=torch.cat([margin, -margin]) / 2, chosen=torch.arange(2 * pairs) < pairs
    )
    both = _weights(method, tokens) / 2  # the pair's loss is on both of its tokens
    return both[:pairs], both[pairs:]


def label_weights(method: PolicyMethod, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights on grad log pi of desirable and of undesirable responses. [S] -> [S], [S]

    The responses have one token each and this log(pi / pi_ref). A weight is -dL/dlog pi, where L is the mean over
    responses times their number. Sums over the update are taken over these responses.
    """
    n = len(log_ratio)
    logprobs = (-1 + log_ratio.clamp(max=0)).repeat(2)
    tokens = _single_tokens(logprobs, logprobs - log_ratio.repeat(2), torch.arange(2 * n))
    both = _weights(method, dataclasses.replace(tokens, chosen=torch.arange(2 * n) < n))
    return both[:n], both[n:]


def likelihood_weight(method: PolicyMethod, logprobs: Tensor) -> Tensor:
    """Return the weight on grad log pi of one-token responses that are trained on and have this log pi. [N] -> [N]"""
    return _weights(method, _single_tokens(logprobs, logprobs, torch.arange(len(logprobs))))


def _single_tokens(logprobs: Tensor, others: Tensor, group: Tensor) -> PolicyTokens:
    """Return responses of one token each, whose log pi_old, log mu and log pi_ref are `others`. [N], [N], [N]"""
    zeros = torch.zeros_like(logprobs)
    optional: dict[str, Any] = {**dict.fromkeys(OPTIONAL, zeros), "ref_logprobs": others}
    return PolicyTokens(
        logprobs=logprobs,
        behavior_logprobs=others,
        old_logprobs=others,
        advantages=zeros,
        entropy=zeros + 1,
        sequence=torch.arange(len(logprobs)),
        group=group,
        staleness=torch.zeros(len(logprobs), dtype=torch.int64),
        **optional,
    )


def _weights(method: PolicyMethod, tokens: PolicyTokens) -> Tensor:
    """Return -dL/dlog pi - dL/dV, [N], where L is the sum of the tokens' losses. Either term may be absent."""
    assert tokens.values is not None
    leaves = (tokens.logprobs.detach().requires_grad_(), tokens.values.detach().requires_grad_())
    tokens = dataclasses.replace(tokens, logprobs=leaves[0], values=leaves[1])
    loss = method.loss(with_update_sums(method, tokens)).loss.sum()
    zeros = torch.zeros_like(tokens.advantages)  # 0 - g is never -0.0
    return sum((zeros - g for g in torch.autograd.grad(loss, leaves, allow_unused=True) if g is not None), zeros)


def weighs(correction: Callable[[PolicyTokens], Correction]) -> bool:
    """Return whether a correction gives a kept token a factor other than 1."""
    answer = _corrected(correction)
    return bool((answer.weights[answer.keep] != 1).any())


def rejects(correction: Callable[[PolicyTokens], Correction]) -> bool:
    """Return whether a correction can leave tokens out."""
    return not bool(_corrected(correction).keep.all())


def rejects_agreement(correction: Callable[[PolicyTokens], Correction]) -> bool:
    """Return whether a correction leaves out even a token on which trainer and engine agree, rho = 1."""
    keep = _corrected(correction).keep
    return not bool(keep[len(keep) // 2])


def with_update_sums(method: PolicyMethod, tokens: PolicyTokens) -> PolicyTokens:
    """Return the tokens with the method's sums over the update, taken over these tokens alone."""
    with torch.no_grad():
        return dataclasses.replace(
            tokens, update_sums={name: values.sum() for name, values in method.update_sums(tokens).items()}
        )


def _corrected(correction: Callable[[PolicyTokens], Correction]) -> Correction:
    """Return the correction of one-token responses whose rho runs from exp(-20) to exp(20); the middle one has rho = 1.

    Raises:
        TypeError: the correction returns no Correction of as many tokens.
    """
    magnitudes = torch.logspace(-4, 1.3, 200)
    log_rho = torch.cat([-magnitudes.flip(0), torch.zeros(1), magnitudes])
    n = len(log_rho)
    old = torch.full((n,), -30.0)
    tokens = _single_tokens(old, old, torch.arange(n))
    without: dict[str, Any] = dict.fromkeys(OPTIONAL)
    answer = correction(dataclasses.replace(tokens, behavior_logprobs=old - log_rho, entropy=torch.zeros(n), **without))
    if not isinstance(answer, Correction):
        raise TypeError(f"returned a {type(answer).__name__}, not an algs.records.Correction(weights, keep)")
    if answer.weights.shape != (n,) or answer.keep.shape != (n,) or answer.keep.dtype != torch.bool:
        raise TypeError("weights must be one number per token, keep one bool per token")
    return answer


def _losses_and_filled_gradients(method: PolicyMethod, tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """Return the losses [2N] and their gradients by logprobs, entropy and values [3N], 0 where there is none."""
    losses, gradients = _losses_and_gradients(method, tokens)
    filled = [torch.zeros_like(tokens.logprobs) if g is None else g for g in gradients.values()]
    return losses, torch.cat(filled)


@torch.enable_grad()
def _losses_and_gradients(method: PolicyMethod, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the method's losses followed by the critic's, [2N], and by name the gradient of their sum, [N] or None."""
    assert tokens.values is not None
    leaves = {name: getattr(tokens, name).detach().clone().requires_grad_() for name in DIFFERENTIABLE}
    answer = method.loss(with_update_sums(method, dataclasses.replace(tokens, **leaves)))
    critic = torch.zeros_like(answer.loss) if answer.critic is None else answer.critic
    total = answer.loss.sum() + critic.sum()
    gradients: dict[str, Tensor | None] = dict.fromkeys(leaves)
    if total.requires_grad:
        by_leaf = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        gradients = dict(zip(leaves, by_leaf, strict=True))
    return torch.cat([answer.loss, critic]).detach(), gradients
