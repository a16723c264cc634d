"""Compute log-probabilities and entropies of chosen tokens without holding the logits of a whole micro-batch.

There are two levels. A chunk of rows goes through the matrix product, in the compute type. Within a chunk, blocks of a
few rows go through the float32 softmax while they are in the processor's cache. The backward pass computes the logits
again; they are kept only when all of them fit into one chunk and the compute type is not float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Logits per chunk: 128 MiB in bfloat16. With larger chunks the weight's gradient is summed in fewer parts.
CHUNK_ELEMENTS = 1 << 26
BLOCK_ELEMENTS = 1 << 20  # logits per block: 4 MiB in float32
SLICE_ROWS = 1 << 14  # rows of the weight's gradient that are added at a time


@dataclass(frozen=True)
class _Settings:
    temperature: float
    softcap: float | None
    compute: torch.dtype
    chunk: int  # rows, a multiple of block
    block: int  # rows


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
    chunk_elements: int = CHUNK_ELEMENTS,
    block_elements: int = BLOCK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """Return log pi(target) and the entropy of pi, where pi = softmax(logits / temperature).

    Args:
        hidden: [U, H].
        head_weight: [V, H].
        targets: [N] int64.
        rows: [N] int64, the hidden state that each target is predicted from; several targets may share one. None means
            that target n is predicted from hidden state n.
        head_bias: [V].
        softcap: with a value c, logits become c * tanh(logits / c), as in Gemma.
        float32_head: compute the matrix product in float32 whatever the weights' type. The softmax is always float32.

    Returns:
        logprobs [N] float32 and entropy [N] float32 in nats, differentiable with respect to hidden, head_weight and
        head_bias.
    """
    if rows is None:
        assert len(targets) == len(hidden), "without rows, every hidden state has one target"
        rows = torch.arange(len(targets), device=targets.device)
    kind = hidden.device.type
    compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    block = max(1, block_elements // len(head_weight))
    settings = _Settings(
        temperature=temperature,
        softcap=softcap,
        compute=torch.float32 if float32_head else compute,
        chunk=max(1, chunk_elements // len(head_weight) // block) * block,
        block=block,
    )
    with torch.autocast(kind, enabled=False):
        logprobs, entropy = _ChunkedHead.apply(hidden, head_weight, head_bias, targets, rows, settings)
        return logprobs, entropy.index_select(0, rows)


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: Tensor, s: _Settings
    ) -> tuple[Tensor, Tensor]:
        count = len(hidden)
        order = torch.argsort(rows, stable=True)  # targets by row: those of a block of rows are a slice
        starts = torch.arange(0, count + s.block, s.block, device=rows.device)
        bounds = torch.searchsorted(rows[order], starts).tolist()
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        log_sums = torch.empty(count, dtype=torch.float32, device=hidden.device)
        entropy = torch.empty(count, dtype=torch.float32, device=hidden.device)
        matrix = weight.to(s.compute)
        kept_logits = None
        for begin in range(0, count, s.chunk):
            chunk = hidden[begin : begin + s.chunk].to(s.compute) @ matrix.T
            for offset in range(0, len(chunk), s.block):
                first = begin + offset
                own = slice(first, min(first + s.block, count))
                z, _ = _scaled(chunk[offset : offset + s.block], bias, s)
                logp = torch.log_softmax(z, dim=1)
                picked = order[bounds[first // s.block] : bounds[first // s.block + 1]]
                logprobs[picked] = logp[rows[picked] - first, targets[picked]]
                log_sums[own] = z[:, 0] - logp[:, 0]
                p = torch.exp(logp, out=z)
                entropy[own] = -torch.bmm(p[:, None], logp[:, :, None])[:, 0, 0]
            if count <= s.chunk and s.compute != torch.float32:
                kept_logits = chunk
        ctx.save_for_backward(hidden, weight, bias, targets, rows, order, log_sums, entropy, kept_logits)
        ctx.settings, ctx.bounds = s, bounds
        ctx.set_materialize_grads(False)  # an unused entropy then costs nothing in the backward pass
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, rows, order, log_sums, entropy, kept_logits = ctx.saved_tensors
        s, bounds = ctx.settings, ctx.bounds
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_logprobs, grad_entropy = grads
        if grad_logprobs is None:
            grad_logprobs = torch.zeros(len(targets), device=hidden.device)
        grad_rows = torch.zeros(len(hidden), device=hidden.device).index_add_(0, rows, grad_logprobs)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight: Tensor | None = None
        grad_bias = torch.zeros(len(weight), device=weight.device) if need_bias else None
        matrix = weight.to(s.compute)
        for begin in range(0, len(hidden), s.chunk):
            h = hidden[begin : begin + s.chunk].to(s.compute)
            # The chunk's logits are replaced by their gradients, block by block.
            chunk = h @ matrix.T if kept_logits is None else kept_logits.clone()
            for offset in range(0, len(chunk), s.block):
                first = begin + offset
                own = slice(first, min(first + s.block, len(hidden)))
                z, slope = _scaled(chunk[offset : offset + s.block], bias, s)
                z.sub_(log_sums[own, None])  # log p
                # d log p(target) / dz = onehot - p;  d entropy / dz = -p (log p + entropy)
                if grad_entropy is None:
                    g = z.exp_().mul_(-grad_rows[own, None])
                else:
                    factor = (z + entropy[own, None]).mul_(grad_entropy[own, None]).add_(grad_rows[own, None])
                    g = z.exp_().mul_(factor.neg_())
                picked = order[bounds[first // s.block] : bounds[first // s.block + 1]]
                g.index_put_((rows[picked] - first, targets[picked]), grad_logprobs[picked], accumulate=True)
                if slope is not None:
                    g.mul_(slope)
                if s.temperature != 1:
                    g.div_(s.temperature)
                if grad_bias is not None:
                    grad_bias += g.sum(0)
                chunk[offset : offset + s.block] = g
            if grad_hidden is not None:
                grad_hidden[begin : begin + s.chunk] = chunk @ matrix
            if need_weight:
                grad_weight = _add_product(grad_weight, chunk.T, h)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return total + a @ b, computed in place where possible; sums of several products are float32."""
    if total is None:
        return a @ b
    if a.dtype == torch.float32:
        return total.addmm_(a, b)
    total = total.float()
    for begin in range(0, len(a), SLICE_ROWS):  # adding mixed types makes float32 copies; slices keep them small
        own = slice(begin, begin + SLICE_ROWS)
        total[own] += a[own] @ b
    return total


def _scaled(logits: Tensor, bias: Tensor | None, s: _Settings) -> tuple[Tensor, Tensor | None]:
    """Return cap(logits + bias) / temperature, float32, and the slope of the cap or None. Both may be overwritten."""
    z, slope = logits.float(), None
    if bias is not None:
        z = z + bias.float()
    if s.softcap is not None:
        capped = torch.tanh(z / s.softcap)
        z, slope = capped * s.softcap, 1 - capped.square()
    return (z if s.temperature == 1 else z.div_(s.temperature)), slope
