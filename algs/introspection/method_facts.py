"""What a method or a correction does, asked of itself on made-up tokens, so that its author need not declare it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from algs.method import PolicyMethod
from algs.records import Correction, Groups, PolicyTokens

READABLE = ("old_logprobs", "behavior_logprobs", "ref_logprobs", "values", "advantages")
DIFFERENTIABLE = ("logprobs", "entropy", "values")  # what the model makes
LENGTHS = (4, 1, 5, 2, 3, 1)  # action tokens of the made-up responses
GROUPS = (0, 0, 1, 1, 2, 2)
# Numbers that not every method is given; what is added to PolicyTokens as an optional field is among them by itself.
OPTIONAL = tuple(f.name for f in dataclasses.fields(PolicyTokens) if f.default is None and f.name != "chosen")
CHOSEN = (True, False, False, True, True, False)  # one of each group, so that they are pairs too


def made_up_tokens() -> PolicyTokens:
    """Return sixteen tokens of six responses in three groups, with every optional field. They are the same at every
    call.

    Ratios run from exp(-4) to exp(4), far on both sides of any usual clip; advantages have both signs. Each group is a
    pair, for methods that learn from preferences; for one that learns from labels each response has its own.
    """
    n = sum(LENGTHS)
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
        sequence=torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)),
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
    """Return groups of the given sizes whose rewards all differ, with a critic's fields when asked for."""
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


def ignores_zero_advantage(method: PolicyMethod) -> bool:
    """Return whether a token with advantage 0 gives no gradient under this method and its parameters.

    A KL term acts on every token, and so does a critic's loss: then nothing may be left out of the forward pass.
    """
    tokens = made_up_tokens()
    tokens = dataclasses.replace(tokens, advantages=torch.zeros_like(tokens.advantages))
    _, gradients = _asked(method, tokens)
    return not gradients.any()


def reads(method: PolicyMethod) -> frozenset[str]:
    """Return which of `READABLE` change the method's loss, or its gradient, when they vary."""
    tokens = made_up_tokens()
    before = _asked(method, tokens)
    found = set()
    for name in READABLE:
        held = getattr(tokens, name)
        # each token moves by another amount, so that no sum or mean over tokens stays where it was
        moved = dataclasses.replace(tokens, **{name: held + torch.linspace(-0.7, 0.9, len(held))})
        if any(not torch.equal(a, b) for a, b in zip(before, _asked(method, moved), strict=True)):
            found.add(name)
    return frozenset(found)


def differentiates(method: PolicyMethod) -> frozenset[str]:
    """Return which of `DIFFERENTIABLE` are in the graph of the method's loss, gradient 0 or not."""
    _, gradients = _losses_and_gradients(method, made_up_tokens())
    return frozenset(name for name, gradient in gradients.items() if gradient is not None)


def gradient_weight(method: PolicyMethod, log_ratio: Tensor, advantage: Tensor | float) -> Tensor:
    """Return the weight on grad log pi, -dL/dlog pi, of responses of one token with pi_old = mu = pi / ratio. [N] ->
    [N]

    Args:
        log_ratio: [N] floating, log(pi / pi_old).
        advantage: [N], or one for all.

    Sums over the step (P3O's effective sample size) are taken over the given tokens.
    """
    old = -1 - log_ratio.clamp(min=0)  # both stay below 0, as log-probabilities are
    tokens = _single_tokens(old + log_ratio, old, torch.arange(len(log_ratio)))
    return _weights(method, dataclasses.replace(tokens, advantages=torch.zeros_like(log_ratio) + advantage))


def pair_weights(method: PolicyMethod, margin: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights on grad log pi of the chosen and the rejected response, -dL/dlog pi of the mean over pairs
    times their number, for pairs of one-token responses whose log-ratios to the reference differ by `margin`. [P] ->
    [P], [P]

    The more probable response of a pair has log pi = -1, and pi_ref gives both -1. Of a method that scores responses
    with a value head it is the weight on the score's gradient, for scores of +- margin / 2."""
    pairs = len(margin)
    logprobs = torch.cat([-1 + margin.clamp(max=0), -1 - margin.clamp(min=0)])
    tokens = _single_tokens(logprobs, torch.full_like(logprobs, -1.0), torch.arange(pairs).repeat(2))
    tokens = dataclasses.replace(
        tokens, values=torch.cat([margin, -margin]) / 2, chosen=torch.arange(2 * pairs) < pairs
    )
    found = _weights(method, tokens) / 2  # the pair's loss is on both of its tokens
    return found[:pairs], found[pairs:]


def label_weights(method: PolicyMethod, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights on grad log pi of desirable and of undesirable one-token responses with this log pi / pi_ref,
    -dL/dlog pi of the mean over responses times their number. [S] -> [S], [S]. Sums over the step are those of these
    responses."""
    n = len(log_ratio)
    logprobs = (-1 + log_ratio.clamp(max=0)).repeat(2)
    tokens = _single_tokens(logprobs, logprobs - log_ratio.repeat(2), torch.arange(2 * n))
    found = _weights(method, dataclasses.replace(tokens, chosen=torch.arange(2 * n) < n))
    return found[:n], found[n:]


def likelihood_weight(method: PolicyMethod, logprobs: Tensor) -> Tensor:
    """Return the weight on grad log pi of trained tokens with this log pi, responses of one token. [N] -> [N]"""
    return _weights(method, _single_tokens(logprobs, logprobs, torch.arange(len(logprobs))))


def _single_tokens(logprobs: Tensor, others: Tensor, group: Tensor) -> PolicyTokens:
    """Return responses of one token each, where pi_old, mu and pi_ref are `others`. [N], [N], [N]"""
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
    """Return -dL/dlog pi, L the sum of the tokens' losses; plus -dL/dV, for a method whose loss is on the values.
    [N]"""
    assert tokens.values is not None
    leaves = (tokens.logprobs.detach().requires_grad_(), tokens.values.detach().requires_grad_())
    tokens = dataclasses.replace(tokens, logprobs=leaves[0], values=leaves[1])
    loss = method.loss(with_update_sums(method, tokens)).loss.sum()
    zeros = torch.zeros_like(tokens.advantages)  # and no -0.0
    return sum((zeros - g for g in torch.autograd.grad(loss, leaves, allow_unused=True) if g is not None), zeros)


def weighs(correction: Callable[[PolicyTokens], Correction]) -> bool:
    """Return whether a correction gives a kept token a factor other than 1, and so multiplies by rho in one way or
    another."""
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
    """Return the tokens with the method's sums over the step, taken over these tokens alone."""
    with torch.no_grad():
        return dataclasses.replace(
            tokens, update_sums={name: values.sum() for name, values in method.update_sums(tokens).items()}
        )


def _corrected(correction: Callable[[PolicyTokens], Correction]) -> Correction:
    """Return the answer for responses of one token whose rho runs from exp(-20) to exp(20), in fine steps around 1,
    which is in the middle.

    Raises:
        TypeError: it is no Correction of as many tokens.
    """
    away = torch.logspace(-4, 1.3, 200)
    log_rho = torch.cat([-away.flip(0), torch.zeros(1), away])
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


def _asked(method: PolicyMethod, tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """Return the method's losses, and their gradient by logprobs, entropy and values; 0 where there is none. [2N],
    [3N]"""
    losses, gradients = _losses_and_gradients(method, tokens)
    filled = [torch.zeros_like(tokens.logprobs) if g is None else g for g in gradients.values()]
    return losses, torch.cat(filled)


@torch.enable_grad()
def _losses_and_gradients(method: PolicyMethod, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the method's losses, the critic's behind them, [2N]; and what is in their graph: by name a gradient [N] or
    None."""
    assert tokens.values is not None
    leaves = {name: getattr(tokens, name).detach().clone().requires_grad_() for name in DIFFERENTIABLE}
    answer = method.loss(with_update_sums(method, dataclasses.replace(tokens, **leaves)))
    critic = torch.zeros_like(answer.loss) if answer.critic is None else answer.critic
    total = answer.loss.sum() + critic.sum()
    gradients: dict[str, Tensor | None] = dict.fromkeys(leaves)
    if total.requires_grad:
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        gradients = dict(zip(leaves, found, strict=True))
    return torch.cat([answer.loss, critic]).detach(), gradients
