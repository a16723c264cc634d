"""Attention over packed sequences, registered with transformers' attention interface.

A packed micro-batch is one row of T tokens. Its layout (orchestration/model/packed_layout.py) says which token sees
which. It reaches the attention function as the keyword argument `packed` of the model's forward pass. The model must be
called with attention_mask=None and use_cache=False.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from orchestration.cluster.devices import BUCKETS, FLEX
from orchestration.model.packed_layout import SHORT_KEYS, Occurrences, PackedLayout


def _checked_layout(
    module: torch.nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict
) -> PackedLayout:
    """Return the layout, after refusing everything that this attention would otherwise ignore."""
    packed = kwargs.get("packed")
    if packed is None:
        raise ValueError("packed attention needs packed=PackedLayout(...) in the model's forward arguments")
    name = type(module).__name__
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise ValueError(
            f"{name}: attention with a soft cap, sinks or a position bias is not supported in packed sequences"
        )
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise ValueError(f"{name}: only causal attention is supported in packed sequences")
    assert mask is None, "packed attention takes its mask from the layout: call the model with attention_mask=None"
    assert query.shape[0] == 1 and query.shape[2] == packed.tokens, "a packed micro-batch is one row of T tokens"
    assert key.shape[2] == packed.tokens, "packed attention takes no cache: call the model with use_cache=False"
    packed.calls += 1
    return packed


class _Gather(torch.autograd.Function):
    """Compute x[index]. The backward pass gathers too, because adding token by token is many times slower."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Occurrences) -> Tensor:  # [T, ...] -> [M, ...]
        ctx.places = places
        return x.index_select(0, places.index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        p = ctx.places
        out = grad.index_select(0, p.first)
        if len(p.more):
            out.index_add_(0, p.more_tokens, grad.index_select(0, p.more))
        return out, None


class _PutBack(torch.autograd.Function):
    """Invert a gather in which every token occurs once. Padding is dropped and gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Occurrences) -> Tensor:  # [M, ...] -> [T, ...]
        ctx.places = places
        return x.index_select(0, places.first)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.places.index).index_fill_(0, ctx.places.padding, 0), None


def bucket_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute packed attention as a few dense ones: rows of similar shapes are gathered, attended to and put back.

    query [1, heads, T, d], key and value [1, kv_heads, T, d] -> [1, T, heads, d], None. This works on any device and
    supports grouped queries and sliding windows (by position, so also across a shared prompt).

    Raises:
        ValueError: the model asks for a soft cap, sinks, a position bias or bidirectional attention.
    """
    packed = _checked_layout(module, query, key, attention_mask, kwargs)
    buckets = packed.buckets
    q_parts = _Gather.apply(query[0].transpose(0, 1), buckets.queries).split([b * q for b, q, _ in buckets.shapes])
    k_parts = _Gather.apply(key[0].transpose(0, 1), buckets.keys).split([b * k for b, _, k in buckets.shapes])
    v_parts = _Gather.apply(value[0].transpose(0, 1), buckets.keys).split([b * k for b, _, k in buckets.shapes])
    outputs = []
    for (rows, _, keys), mask, *parts in zip(
        buckets.shapes, packed.masks(sliding_window), q_parts, k_parts, v_parts, strict=True
    ):
        q, k, v = (part.unflatten(0, (rows, -1)).transpose(1, 2) for part in parts)  # [b, heads, L, d]
        if keys <= SHORT_KEYS:
            out = _short_attention(q, k, v, mask, dropout, scaling)
        else:
            grouped = q.shape[1] != k.shape[1]
            out = scaled_dot_product_attention(q, k, v, mask, dropout, scale=scaling, enable_gqa=grouped)
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # [b * Lq, heads, d]
    return _PutBack.apply(torch.cat(outputs), buckets.queries)[None], None


def _short_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float, scaling: float | None) -> Tensor:
    """Compute scaled_dot_product_attention by two matrix products. Scores, added mask and softmax are float32."""
    rows, heads, queries, size = q.shape
    flat = (rows * k.shape[1], -1, size)  # the query heads that share a key head are rows of one matrix
    scores = torch.bmm(q.reshape(flat), k.reshape(flat).transpose(1, 2)).view(rows, heads, queries, -1)
    weights = torch.add(mask, scores, alpha=size**-0.5 if scaling is None else scaling).softmax(-1)
    weights = drop(weights, dropout).to(v.dtype)
    return torch.bmm(weights.view(flat[0], -1, k.shape[2]), v.reshape(flat)).view(rows, heads, queries, -1)


_compiled_flex: Any = None


def flex_packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute packed attention by torch's flex_attention: one fused kernel that skips blocks between segments.

    Shapes are those of `bucket_attention`. On CUDA the kernel is compiled; on CPU it runs uncompiled, for checks only.
    It has not been run on CUDA yet: feynrl_buckets is the alternative there.

    Raises:
        ValueError: the model asks for dropout, a soft cap, sinks, a position bias or bidirectional attention.
    """
    from torch.nn.attention.flex_attention import flex_attention

    global _compiled_flex
    packed = _checked_layout(module, query, key, attention_mask, kwargs)
    if dropout:
        raise ValueError(f"{type(module).__name__}: attention dropout is not supported by {FLEX}")
    function = flex_attention
    if query.device.type == "cuda":
        if _compiled_flex is None:
            _compiled_flex = torch.compile(flex_attention, dynamic=True)
        function = _compiled_flex
    out = function(
        query,
        key,
        value,
        block_mask=packed.block_mask(sliding_window),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2), None


AttentionInterface.register(BUCKETS, bucket_attention)
AttentionInterface.register(FLEX, flex_packed_attention)
