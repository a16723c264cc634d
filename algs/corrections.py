"""Off-policy corrections deal with tokens on which trainer and engine disagree, by rho = pi_old / mu.

Each correction returns a factor on each token's loss, and whether the token is trained on at all. Corrections go with
any method whose ratio is pi / pi_old. A method whose ratio is already against mu (P3O, AIPO, DecoupledPPO) must have
none, because mu would count twice.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from algs.method import knob
from algs.records import Correction, PolicyTokens


def token_truncate(
    t: PolicyTokens, cap: Annotated[float, knob("Largest factor on a token.", gt=0)] = 2.0
) -> Correction:
    """Weigh each token by min(rho, cap) (truncated importance sampling, TIS: Yao et al. 2025)."""
    return _keeping_all(_log_rho(t).exp().clamp(max=cap))


def token_mask(
    t: PolicyTokens,
    low: Annotated[float, knob("Tokens with a smaller rho are left out.", ge=0)] = 0.5,
    high: Annotated[float, knob("Tokens with a larger rho are left out.", gt=0)] = 5.0,
) -> Correction:
    """Weigh tokens by rho where low <= rho <= high, and leave out others (masked importance sampling, MIS; IcePop)."""
    return _keeping_within(_log_rho(t).exp(), low, high)


def sequence_truncate(
    t: PolicyTokens, cap: Annotated[float, knob("Largest factor on a response.", gt=0)] = 2.0
) -> Correction:
    """Weigh each token of a response by min(product of rho over the response, cap) (sequence TIS)."""
    return _keeping_all(_sequence_rho(t).clamp(max=cap))


def sequence_mask(
    t: PolicyTokens,
    low: Annotated[float, knob("Responses with a smaller product are left out.", ge=0)] = 0.5,
    high: Annotated[float, knob("Responses with a larger product are left out.", gt=0)] = 5.0,
) -> Correction:
    """Weigh a response by its product of rho where low <= product <= high, leave out others (sequence MIS)."""
    return _keeping_within(_sequence_rho(t), low, high)


def geometric_mask(
    t: PolicyTokens,
    low: Annotated[float, knob("Responses with a smaller mean are left out.", ge=0)] = 0.99,
    high: Annotated[float, knob("Responses with a larger mean are left out.", gt=0)] = 1.01,
) -> Correction:
    """Leave out responses whose geometric mean of rho is not within low..high (geometric rejection); others weigh 1.

    The mean of longer responses varies less: 0.999..1.001 suits responses of thousands of tokens, the default those of
    some hundred.
    """
    rho = t.sequence_mean(_log_rho(t)).exp()[t.sequence]
    return Correction(torch.ones_like(rho), (rho >= low) & (rho <= high))


def veto(
    t: PolicyTokens, threshold: Annotated[float, knob("A response with one smaller rho is left out.", gt=0)] = 1e-4
) -> Correction:
    """Leave out a response when rho of any of its tokens is below the threshold; the others keep the factor 1."""
    rho = _log_rho(t).exp()
    return Correction(torch.ones_like(rho), (t.sequence_sum((rho < threshold).float()) == 0)[t.sequence])


def _log_rho(t: PolicyTokens) -> Tensor:
    return (t.old_logprobs - t.behavior_logprobs).detach()


def _sequence_rho(t: PolicyTokens) -> Tensor:
    return t.sequence_sum(_log_rho(t)).exp()[t.sequence]


def _keeping_all(weights: Tensor) -> Correction:
    return Correction(weights, torch.ones_like(weights, dtype=torch.bool))


def _keeping_within(rho: Tensor, low: float, high: float) -> Correction:
    keep = (rho >= low) & (rho <= high)
    return Correction(torch.where(keep, rho, 0.0), keep)
