"""Aggregation turns per-token losses into one number: the sum over tokens of a weight times the token's loss.

In every mode the weight is constant within a trajectory, and its denominators are global over the update. The driver
computes the weights once, before sharding, so any split into micro-batches and ranks gives the same gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

MODES = ("token_mean", "sequence_mean", "prompt_mean", "fixed_length", "sequence_sum")


def token_weights(mode: str, lengths: Tensor, group: Tensor, max_new_tokens: int) -> Tensor:
    """Return the weight of each trajectory's tokens. lengths [S] int64, group [S] int64 in 0..P-1 -> [S] float32

    S and P do not count trajectories without action tokens. Names of verl (loss_agg_mode) and of trl (loss_type):

        mode           weight                        of         verl                     trl
        token_mean     1 / sum(T)                    DAPO       token-mean               dapo, bnpo
        sequence_mean  1 / (S T_i)                   GRPO       seq-mean-token-mean      grpo
        prompt_mean    1 / (P tokens of the prompt)  ScaleRL
        fixed_length   1 / (S max_new_tokens)        Dr. GRPO   seq-mean-token-sum-norm  dr_grpo
        sequence_sum   1 / S                         RLOO       seq-mean-token-sum

    fixed_length is sequence_sum divided by a constant. LUSPO's sum over a response is sequence_sum too.

    Raises:
        ValueError: `mode` is not one of MODES.
    """
    tokens = lengths.to(torch.float64)
    present = lengths > 0
    if mode == "token_mean":
        weights = torch.ones_like(tokens) / tokens.sum().clamp(min=1)
    elif mode == "sequence_mean":
        weights = 1 / (tokens.clamp(min=1) * present.sum().clamp(min=1))
    elif mode == "prompt_mean":
        groups = int(group.max()) + 1 if group.numel() else 0
        per_prompt = tokens.new_zeros(groups).index_add_(0, group, tokens)
        weights = 1 / (per_prompt.clamp(min=1)[group] * (per_prompt > 0).sum().clamp(min=1))
    elif mode == "fixed_length":
        weights = torch.ones_like(tokens) / (present.sum().clamp(min=1) * max_new_tokens)
    elif mode == "sequence_sum":
        weights = torch.ones_like(tokens) / present.sum().clamp(min=1)
    else:
        raise ValueError(f"aggregation '{mode}' is not one of {', '.join(MODES)}")
    return torch.where(present, weights, torch.zeros_like(weights)).to(torch.float32)
