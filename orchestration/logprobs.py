"""Log-probabilities and entropy of chosen tokens from hidden states and the head, a chunk of rows at a time.

The [rows, vocabulary] logits of a whole micro-batch never exist: each chunk's are made, reduced and dropped, and made
again in the backward pass. The softmax is always float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def token_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    rows: Tensor | None = None,
    head_bias: Tensor | None = None,
    softcap: float | None = None,
    float32_head: bool = False,
    chunk_tokens: int = 256,
) -> tuple[Tensor, Tensor]:
    """log pi(target) and entropy of pi, pi = softmax(logits / temperature).

    hidden [U, H], head_weight [V, H], targets [N] int64, rows [N] int64: the hidden state a target is predicted from
    (default: target n from hidden n; several targets may share one). head_bias [V]. softcap c: logits become
    c * tanh(logits / c), as in Gemma-2. float32_head: the matrix product in float32 whatever the weights' type.

    Returns logprobs [N] float32 and entropy [N] float32 (nats), both differentiable to hidden, head_weight, head_bias.
    """
    if rows is None:
        assert len(targets) == len(hidden), "without rows, every hidden state has one target"
        rows = torch.arange(len(targets), device=targets.device)
    compute = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        compute = torch.get_autocast_dtype(hidden.device.type)
    if float32_head:
        compute = torch.float32
    with torch.autocast(hidden.device.type, enabled=False):
        logprobs, entropy = _ChunkedHead.apply(
            hidden, head_weight, head_bias, targets, rows, float(temperature), softcap, compute, chunk_tokens
        )
        return logprobs, entropy[rows]


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        rows: Tensor,
        temperature: float,
        softcap: float | None,
        compute: torch.dtype,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        count = len(hidden)
        order = torch.argsort(rows, stable=True)  # targets by row, so that a chunk of rows is a slice of targets
        starts = torch.arange(0, count + chunk, chunk, device=rows.device).clamp(max=count)
        bounds = torch.searchsorted(rows[order], starts).tolist()
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        log_sums = torch.empty(count, dtype=torch.float32, device=hidden.device)
        entropy = torch.empty(count, dtype=torch.float32, device=hidden.device)
        matrix = weight.to(compute)
        for c, begin in enumerate(range(0, count, chunk)):
            own = slice(begin, min(begin + chunk, count))
            z = _logits(hidden[own].to(compute), matrix, bias, softcap)[0].div_(temperature)
            logp = torch.log_softmax(z, dim=1)
            log_sums[own] = z[:, 0] - logp[:, 0]
            picked = order[bounds[c] : bounds[c + 1]]
            logprobs[picked] = logp[rows[picked] - begin, targets[picked]]
            p = torch.exp(logp, out=z)
            # -E[log p]; as a batched dot product it needs no further [chunk, V] tensor
            entropy[own] = -torch.bmm(p[:, None], logp[:, :, None])[:, 0, 0]
        ctx.save_for_backward(hidden, weight, bias, targets, rows, order, log_sums, entropy)
        ctx.settings = (temperature, softcap, compute, chunk, bounds)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, rows, order, log_sums, entropy = ctx.saved_tensors
        temperature, softcap, compute, chunk, bounds = ctx.settings
        grad_logprobs, grad_entropy = grads
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 9
        if grad_logprobs is None:
            grad_logprobs = torch.zeros(len(targets), device=hidden.device)
        per_row = torch.zeros(len(hidden), device=hidden.device).index_add_(0, rows, grad_logprobs.float())
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if need_weight else None
        grad_bias = torch.zeros(weight.shape[0], device=weight.device) if need_bias else None
        matrix = weight.to(compute)
        for c, begin in enumerate(range(0, len(hidden), chunk)):
            own = slice(begin, min(begin + chunk, len(hidden)))
            h = hidden[own].to(compute)
            z, capped = _logits(h, matrix, bias, softcap)
            z = z.div_(temperature).sub_(log_sums[own, None])  # log p
            # d log p(target) / d z = onehot - p;  d entropy / d z = -p (log p + entropy)
            if grad_entropy is None:
                g = z.exp_().mul_(-per_row[own, None])
            else:
                scale = (z + entropy[own, None]).mul_(grad_entropy[own, None]).add_(per_row[own, None])
                g = z.exp_().mul_(scale).neg_()
            picked = order[bounds[c] : bounds[c + 1]]
            g.index_put_((rows[picked] - begin, targets[picked]), grad_logprobs[picked].float(), accumulate=True)
            g.div_(temperature)
            if capped is not None:
                g.mul_(1 - capped.square())
            if grad_bias is not None:
                grad_bias += g.sum(0)
            g = g.to(compute)
            if grad_hidden is not None:
                grad_hidden[own] = g @ matrix
            if grad_weight is not None:
                grad_weight += g.T @ h
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 6,
        )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """[chunk, V] float32 logits, fresh memory, and tanh(logits / softcap) where there is a cap."""
    z = (hidden @ weight.T).float()
    if bias is not None:
        z = z + bias.float()
    if softcap is None:
        return z, None
    capped = torch.tanh_(z.div_(softcap))
    return capped * softcap, capped
