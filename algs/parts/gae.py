"""The advantage of each token by a critic, which methods that have one share."""

from __future__ import annotations

import torch
from torch import Tensor

from algs.records import Groups


def gae(groups: Groups, discount: float, gae_lambda: float, bootstrap_truncated: bool) -> Tensor:
    """Return A_t = delta_t + discount gae_lambda A_t+1, where delta_t = r_t + discount V_t+1 - V_t (Schulman et al.
    2016, arXiv 1506.02438), [N] float32, not whitened. A + V are the returns.

    After the last token, V is 0 when the response ended, and the value of the state reached when it was cut at the
    length limit. With bootstrap_truncated false it is 0 in both cases: the limit is then part of the task.
    """
    assert groups.values is not None and groups.final_values is not None, "there is no critic"
    assert groups.token_rewards is not None and groups.truncated is not None
    if not groups.values.numel():
        return torch.zeros(0)
    values, rewards = groups.values.to(torch.float64), groups.token_rewards.to(torch.float64)
    ends = groups.lengths.cumsum(0)
    has_tokens = groups.lengths > 0
    last_values = torch.where(groups.truncated & bootstrap_truncated, groups.final_values, 0.0).to(torch.float64)
    next_values = values.roll(-1)
    next_values[ends[has_tokens] - 1] = last_values[has_tokens]
    delta = rewards + discount * next_values - values  # [N]
    sequence = groups.sequence
    position = torch.arange(len(values)) - (ends - groups.lengths)[sequence]
    padded = delta.new_zeros(int(groups.lengths.max()), len(groups.lengths))  # [T_max, S]; 0 after a response's end
    padded[position, sequence] = delta
    for step in range(len(padded) - 2, -1, -1):
        padded[step] += discount * gae_lambda * padded[step + 1]
    return padded[position, sequence].to(torch.float32)
