"""Attention over packed sequences, registered with transformers' attention interface.

A packed micro-batch is one row of T tokens. Which token sees which is said by its segments (data_feeds/packing.py), which
reach the attention function as the keyword argument `packed` of the model's forward pass. Nothing here ever builds a
[T, T] mask. The model must be called with attention_mask=None and use_cache=False.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from data_feeds.packing import Segment
from orchestration.devices import BUCKETS, FLEX

BLOCK = 128  # flex_attention's block size
# Up to so many keys, two plain matrix products are faster on CPU than its fused kernel (forward and backward together:
# five times in bfloat16 at 60 keys, even at 256), and the scores they keep are small beside the layer's other activations.
SHORT_KEYS = 192


class Bucket:
    """Segments of similar lengths, attended to together: b rows of Lq queries and Lk keys, padded at the end."""

    def __init__(self, segments: list[Segment], positions: np.ndarray, device: torch.device) -> None:
        queries = max(s.length for s in segments)
        keys = max(s.prefix_length + s.length for s in segments)
        self.segments = segments
        q_index = np.zeros((len(segments), queries), dtype=np.int64)
        k_index = np.zeros((len(segments), keys), dtype=np.int64)
        q_position = np.full((len(segments), queries), -1, dtype=np.int64)  # -1: padding
        k_position = np.full((len(segments), keys), -1, dtype=np.int64)
        for row, s in enumerate(segments):
            own = np.arange(s.start, s.start + s.length)
            seen = np.concatenate([np.arange(s.prefix_start, s.prefix_start + s.prefix_length), own])
            q_index[row, : len(own)], q_position[row, : len(own)] = own, positions[own]
            k_index[row, : len(seen)], k_position[row, : len(seen)] = seen, positions[seen]
        self.shape = q_index.shape
        self.q_index = torch.from_numpy(q_index.reshape(-1)).to(device)  # [b * Lq]
        self.k_index = torch.from_numpy(k_index.reshape(-1)).to(device)  # [b * Lk]
        self._q_position = torch.from_numpy(q_position).to(device)
        self._k_position = torch.from_numpy(k_position).to(device)
        self.real = q_position.reshape(-1) >= 0  # [b * Lq]

    def mask(self, window: int | None) -> Tensor:
        """[b, 1, Lq, Lk] bool, True where a query sees a key. Within a row, order of positions is causality."""
        q, k = self._q_position[:, :, None], self._k_position[:, None, :]
        seen = (k >= 0) & (k <= q)
        if window is not None:
            seen &= k > q - window
        padding = q < 0
        first = torch.arange(k.shape[2], device=k.device) == 0
        return (seen | (padding & first))[:, None]  # padding sees one key, so that no softmax is empty


class PackedLayout:
    """The segments of one micro-batch as what an attention function needs; made once, used by every layer."""

    def __init__(self, segments: Sequence[Segment], position_ids: np.ndarray, device: torch.device) -> None:
        self.device = device
        self.tokens = len(position_ids)
        self.calls = 0  # attention layers that have used it in this forward pass
        self._segments = tuple(segments)
        self._positions = position_ids
        self._buckets: list[Bucket] | None = None
        self._order: Tensor | None = None
        self._masks: dict[int | None, list[Tensor]] = {}
        self._block_masks: dict[int | None, Any] = {}

    @property
    def buckets(self) -> list[Bucket]:
        if self._buckets is None:
            self._buckets = [Bucket(list(s), self._positions, self.device) for s in group_by_shape(self._segments)]
        return self._buckets

    @property
    def order(self) -> Tensor:
        """[T] where each token's output lies in the buckets' concatenated outputs."""
        if self._order is None:
            flat = np.concatenate([bucket.q_index.cpu().numpy() for bucket in self.buckets])
            real = np.concatenate([bucket.real for bucket in self.buckets])
            order = np.empty(self.tokens, dtype=np.int64)
            order[flat[real]] = np.flatnonzero(real)
            self._order = torch.from_numpy(order).to(self.device)
        return self._order

    def masks(self, window: int | None) -> list[Tensor]:
        """One mask per bucket, for full attention (None) or a sliding window of so many tokens."""
        if window not in self._masks:
            self._masks[window] = [bucket.mask(window) for bucket in self.buckets]
        return self._masks[window]

    def block_mask(self, window: int | None) -> Any:
        if window not in self._block_masks:
            self._block_masks[window] = _block_mask(self._segments, self._positions, window, self.device)
        return self._block_masks[window]


def group_by_shape(segments: Sequence[Segment], waste: float = 0.25) -> list[list[Segment]]:
    """Segments in groups whose padded area (queries * keys) is at most `waste` more than their own."""
    groups: list[list[Segment]] = []
    longest = area = 0
    for s in sorted(segments, key=lambda s: (-s.length, -s.prefix_length, s.start)):
        keys = s.prefix_length + s.length
        if groups:
            queries = groups[-1][0].length
            wider = max(longest, keys)
            if queries * wider * (len(groups[-1]) + 1) <= (1 + waste) * (area + s.length * keys):
                groups[-1].append(s)
                longest, area = wider, area + s.length * keys
                continue
        groups.append([s])
        longest, area = keys, s.length * keys
    return groups


def _checked_layout(
    module: torch.nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict
) -> PackedLayout:
    """The layout, after refusing everything this attention would otherwise ignore."""
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
    """Packed attention as a few dense ones: segments of similar length are gathered, attended to and put back.

    query [1, heads, T, d], key and value [1, kv_heads, T, d] -> [1, T, heads, d], None. Any device; grouped queries and
    sliding windows (by position, so also across a shared prompt) are supported.

    Raises:
        ValueError: the model asks for a soft cap, sinks, a position bias or bidirectional attention.
    """
    packed = _checked_layout(module, query, key, attention_mask, kwargs)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, d]
    outputs = []
    for bucket, mask in zip(packed.buckets, packed.masks(sliding_window), strict=True):
        shape = (len(bucket.segments), -1)
        own_q = q.index_select(0, bucket.q_index).unflatten(0, shape).transpose(1, 2)  # [b, heads, Lq, d]
        own_k = k.index_select(0, bucket.k_index).unflatten(0, shape).transpose(1, 2)  # [b, kv_heads, Lk, d]
        own_v = v.index_select(0, bucket.k_index).unflatten(0, shape).transpose(1, 2)
        if mask.shape[-1] <= SHORT_KEYS and not dropout:
            out = _short_attention(own_q, own_k, own_v, mask, scaling)
        else:
            out = scaled_dot_product_attention(
                own_q, own_k, own_v, mask, dropout, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
            )
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # [b * Lq, heads, d]
    return torch.cat(outputs).index_select(0, packed.order)[None], None


def _short_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """scaled_dot_product_attention with kept scores, for short rows. Shapes as there; scores and softmax in float32."""
    rows, heads, queries, size = q.shape
    flat = (rows * k.shape[1], -1, size)  # the query heads that share a key head are rows of one matrix
    scores = torch.bmm(q.reshape(flat), k.reshape(flat).transpose(1, 2)).view(rows, heads, queries, -1)
    hidden = torch.zeros(mask.shape, dtype=torch.float32, device=q.device).masked_fill_(~mask, -torch.inf)
    weights = torch.add(hidden, scores, alpha=size**-0.5 if scaling is None else scaling).softmax(-1).to(v.dtype)
    return torch.bmm(weights.view(flat[0], -1, k.shape[2]), v.reshape(flat)).view(rows, heads, queries, -1)


def _block_mask(segments: Sequence[Segment], positions: np.ndarray, window: int | None, device: torch.device) -> Any:
    """flex_attention's block mask straight from the segments: [T / 128, T / 128] block flags, never [T, T]."""
    from torch.nn.attention.flex_attention import BlockMask

    tokens = len(positions)
    blocks = -(-tokens // BLOCK)
    segment_start = np.zeros(tokens, dtype=np.int64)
    prefix_start = np.zeros(tokens, dtype=np.int64)
    prefix_end = np.zeros(tokens, dtype=np.int64)
    needed = np.zeros((blocks, blocks), dtype=bool)
    for s in segments:
        end = s.start + s.length
        segment_start[s.start : end] = s.start
        prefix_start[s.start : end], prefix_end[s.start : end] = s.prefix_start, s.prefix_start + s.prefix_length
        rows = slice(s.start // BLOCK, (end - 1) // BLOCK + 1)
        needed[rows, rows] |= np.tri(rows.stop - rows.start, dtype=bool)
        if s.prefix_length:
            needed[rows, s.prefix_start // BLOCK : (s.prefix_start + s.prefix_length - 1) // BLOCK + 1] = True
    start, low, high, position = (
        torch.from_numpy(x).to(device) for x in (segment_start, prefix_start, prefix_end, np.asarray(positions))
    )

    def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = ((k >= start[q]) & (k <= q)) | ((k >= low[q]) & (k < high[q]))
        return seen if window is None else seen & (position[k] > position[q] - window)

    flags = torch.from_numpy(needed)
    counts = flags.sum(1, dtype=torch.int32)
    indices = flags.int().argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return BlockMask.from_kv_blocks(
        counts[None, None].to(device),
        indices[None, None].to(device),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(tokens, tokens),
    )


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
    """Packed attention by torch's flex_attention: one fused kernel that skips blocks between segments.

    Shapes and refusals as in bucket_attention; dropout is refused too. Compiled on CUDA; on CPU it runs uncompiled, which
    is for checking only. It has not been run on CUDA yet: feynrl_buckets is the alternative there.
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
