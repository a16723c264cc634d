"""Advantages on the whole groups of a step: one per response, [S], or per token, [N].

Groups may differ in size. All is computed in float64, in which the mean of equal rewards is exact, so that equal
rewards give an advantage of exactly 0.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from algs.method import knob
from algs.records import Groups

TOLERANCE = 1e-6  # rewards this close count as equal, so that rounding noise does not become a signal


def group_mean(groups: Groups) -> Tensor:
    """Return R - mean_g (Dr. GRPO, arXiv 2503.20783), [S]. A group of one gets 0."""
    return _centred(groups).to(groups.rewards.dtype)


def group_zscore(
    groups: Groups, tolerance: Annotated[float, knob("Rewards this close count as equal.", ge=0)] = TOLERANCE
) -> Tensor:
    """Return (R - mean_g) / (std_g + 1e-6), std with n - 1 (GRPO, arXiv 2402.03300), [S].

    A group whose rewards differ by no more than `tolerance` carries no signal and gets exactly 0, since rounding noise
    divided by 1e-6 would be an advantage of order 1. A group of one gets 0 too.
    """
    centred = _centred(groups)
    variance = groups.sum_by_group(centred.square()) / (groups.sizes - 1).clamp(min=1)
    zscore = centred / (variance.sqrt() + 1e-6)[groups.group]
    return torch.where(_varies(groups, tolerance)[groups.group], zscore, 0.0).to(groups.rewards.dtype)


def rloo(groups: Groups) -> Tensor:
    """Return G / (G - 1) (R - mean_g) = R - mean of the group's other responses (RLOO, arXiv 2402.14740), [S].

    With a KL penalty in the reward, [N]: a token has the penalties from itself on, less the same baseline. A group of
    one has no other responses and gets 0.
    """
    factor = groups.sizes / (groups.sizes - 1).clamp(min=1)
    return _from_each_token(factor[groups.group] * _centred(groups), groups, (groups.sizes > 1)[groups.group])


def lite_ppo(groups: Groups) -> Tensor:
    """Return (R - mean_g) / std of the raw rewards of the step, std with n (Lite PPO, arXiv 2508.08221), [S].

    A step whose rewards are all equal, and a group of one, get 0.
    """
    rewards = groups.rewards.to(torch.float64)
    return _over_spread(_centred(groups), rewards.std(correction=0)).to(groups.rewards.dtype)


def scale_rl(groups: Groups) -> Tensor:
    """Return (R - mean_g) / std of all R - mean_g of the step, std with n (ScaleRL, arXiv 2510.13786), [S].

    A step in which no group's rewards differ, and a group of one, get 0.
    """
    centred = _centred(groups)
    return _over_spread(centred, centred.std(correction=0)).to(groups.rewards.dtype)


def reinforce_plus_plus(
    groups: Groups,
    over: Annotated[
        Literal["responses", "tokens"], knob("What mean and std are over; tokens: long responses count more.")
    ] = "responses",
) -> Tensor:
    """Return (R - mean) / (std + 1e-8) over the step's responses, std with n - 1 (REINFORCE++, arXiv 2501.03262), [S].

    With a KL penalty in the reward, [N]: a token has the penalties from itself on. Over tokens, [N], mean and std are
    of that number, as in the authors' code. A step without spread gets 0.
    """
    if over == "tokens":
        return whiten(groups.rewards[groups.sequence] - _paid_before(groups)).to(groups.rewards.dtype)
    whole = whiten(groups.rewards)
    if not whole.any():
        return whole
    return _from_each_token(whole, groups, 1 / (groups.rewards.to(torch.float64).std() + 1e-8))


def reinforce_plus_plus_baseline(groups: Groups) -> Tensor:
    """Return (R - mean_g) / (std of all R - mean_g of the step + 1e-8), std with n - 1 (REINFORCE++-baseline, arXiv
    2501.03262), [S].

    A step without spread, and a group of one, get 0.
    """
    centred = _centred(groups)  # its mean is 0 but for rounding, which must not reach groups without a signal
    return torch.where(centred == 0, 0.0, whiten(centred)).to(groups.rewards.dtype)


def whiten(x: Tensor) -> Tensor:
    """Return (x - mean) / (std + 1e-8), std with n - 1, [n] -> [n]. A single element, and x without spread, give 0."""
    if x.numel() < 2 or x.max() - x.min() <= TOLERANCE:
        return torch.zeros_like(x)
    exact = x.to(torch.float64)
    return ((exact - exact.mean()) / (exact.std() + 1e-8)).to(x.dtype)


def _paid_before(groups: Groups) -> Tensor:
    """Return the sum of a response's token rewards before each of its tokens, [N] float64: penalties, if any."""
    if groups.token_rewards is None:
        return torch.zeros(int(groups.lengths.sum()), dtype=torch.float64)
    paid = groups.token_rewards.to(torch.float64)
    ends, has_tokens = groups.lengths.cumsum(0), groups.lengths > 0
    paid = paid.index_fill(0, ends[has_tokens] - 1, 0.0)  # the reward itself comes last, before no token
    earlier = paid.cumsum(0) - paid
    starts = (ends - groups.lengths)[groups.sequence]
    return earlier - earlier[starts]


def _from_each_token(whole: Tensor, groups: Groups, scale: Tensor) -> Tensor:
    """Return the advantages of responses, [S], without what each token finds paid already times `scale` ([S] or one),
    [N]; where no token does, the responses' own."""
    before = _paid_before(groups)
    if before.any():
        whole = whole[groups.sequence] - scale.expand(len(whole))[groups.sequence] * before
    return whole.to(groups.rewards.dtype)


def _varies(groups: Groups, tolerance: float = TOLERANCE) -> Tensor:
    """Return whether each group's rewards differ by more than `tolerance`, [P] bool."""
    shape = groups.sizes
    high = torch.full_like(shape, -torch.inf).scatter_reduce_(0, groups.group, groups.rewards, "amax")
    low = torch.full_like(shape, torch.inf).scatter_reduce_(0, groups.group, groups.rewards, "amin")
    return high - low > tolerance


def _centred(groups: Groups) -> Tensor:
    """Return R - mean_g, [S] float64."""
    rewards = groups.rewards.to(torch.float64)
    return rewards - (groups.sum_by_group(rewards) / groups.sizes)[groups.group]


def _over_spread(centred: Tensor, std: Tensor) -> Tensor:
    return centred / std if std > TOLERANCE else torch.zeros_like(centred)
