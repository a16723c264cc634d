"""The parts that preference methods share: a response's log-ratio to the reference, and the metrics they report."""

from __future__ import annotations

import torch
from torch import Tensor

from algs.records import PolicyTokens


def log_ratio(t: PolicyTokens, per_token: bool = False) -> Tensor:
    """Return log pi(y|x) / pi_ref(y|x) of each response, [S]: the sum over tokens, or with `per_token` the mean."""
    assert t.ref_logprobs is not None, "the method's needs() must name ref_logprobs"
    by_token = t.logprobs - t.ref_logprobs  # the difference of two sums over a long response would lose precision
    return t.sequence_mean(by_token) if per_token else t.sequence_sum(by_token)


def rewards_reported(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Return as metrics the implicit rewards, their margin, and whether it is positive. [P], [P] -> [P] each"""
    margin = chosen - rejected
    return {
        "accuracy": (margin > 0).float(),
        "margin": margin,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }


def logprobs_reported(t: PolicyTokens) -> dict[str, Tensor]:
    """Return as metrics the mean log-probability per token of chosen and rejected responses, in nats, [P] each."""
    with torch.no_grad():
        chosen, rejected = t.pairs(t.sequence_mean(t.logprobs))
    return {"chosen_logprob": chosen, "rejected_logprob": rejected}
