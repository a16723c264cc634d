"""The layout of a packed micro-batch says which token sees which, as the index tensors an attention function needs.

It is made once per micro-batch and used by every layer. Nothing in it has the size [T, T]: visibility is worked out
within rows of tokens that can see each other, or within flex_attention's blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_feeds.packing import Segment

BLOCK = 128  # flex_attention's block size
# With at most this many keys, two plain matrix products are faster on CPU than the fused kernel. Forward and backward
# together in bfloat16 they are five times faster at 60 keys and equally fast at 256. The scores they keep are small
# compared with the layer's other activations.
SHORT_KEYS = 192

Ints = np.ndarray


@dataclass(frozen=True)
class Occurrences:
    """The index tensors that gather T tokens into M places of padded rows, and bring them back."""

    index: Tensor  # [M] the token at each place; 0 at padding
    padding: Tensor  # [P] the places that are padding
    first: Tensor  # [T] one place of each token
    more: Tensor  # [R] the further places of tokens that occur more than once
    more_tokens: Tensor  # [R] the tokens at those places

    @classmethod
    def of(cls, places: list[Ints], tokens: int, device: torch.device) -> Occurrences:
        """Build the gather from one [b, L] array of tokens per bucket, -1 at padding. Every token must occur."""
        flat = np.concatenate([array.reshape(-1) for array in places])
        real = np.flatnonzero(flat >= 0)
        _, first_of_token = np.unique(flat[real], return_index=True)
        assert len(first_of_token) == tokens, "the rows of a layout hold every token"
        first = real[first_of_token]
        more = np.setdiff1d(real, first, assume_unique=True)
        parts = (flat.clip(min=0), np.flatnonzero(flat < 0), first, more, flat[more])
        return cls(*(torch.from_numpy(part.astype(np.int64)).to(device) for part in parts))


@dataclass(frozen=True)
class Buckets:
    """Rows in buckets of similar shapes. The rows of a bucket are padded together and attended to together."""

    queries: Occurrences
    keys: Occurrences
    shapes: list[tuple[int, int, int]]  # per bucket: rows b, queries Lq, keys Lk
    places: list[tuple[Tensor, Tensor]]  # per bucket: tokens [b, Lq] and [b, Lk], -1 at padding


class PackedLayout:
    """The layout of one micro-batch: its segments, prepared for attention on `device`."""

    def __init__(self, segments: Sequence[Segment], position_ids: np.ndarray, device: torch.device) -> None:
        self.device = device
        self.tokens = len(position_ids)
        self.calls = 0  # attention layers that have used the layout in this forward pass
        self._segments = tuple(segments)
        start, low, high = (np.zeros(self.tokens, dtype=np.int64) for _ in range(3))
        for s in self._segments:
            own = slice(s.start, s.start + s.length)
            start[own], low[own], high[own] = s.start, s.prefix_start, s.prefix_start + s.prefix_length
        self._start, self._low, self._high, self._position = (
            torch.from_numpy(array).to(device) for array in (start, low, high, np.array(position_ids, dtype=np.int64))
        )
        self._buckets: Buckets | None = None
        self._masks: dict[int | None, list[Tensor]] = {}
        self._block_masks: dict[int | None, Any] = {}

    def sees(self, q: Tensor, k: Tensor, window: int | None) -> Tensor:
        """Return whether the query at packed index q sees the key at packed index k.

        It sees the keys before it in its own segment, and its prefix, as far as they are within the window.
        """
        visible = ((k >= self._start[q]) & (k <= q)) | ((k >= self._low[q]) & (k < self._high[q]))
        return visible if window is None else visible & (self._position[k] > self._position[q] - window)

    @property
    def buckets(self) -> Buckets:
        if self._buckets is None:
            groups = _group_by_shape(_rows(self._segments))
            places = [(_padded([q for q, _ in rows]), _padded([k for _, k in rows])) for rows in groups]
            self._buckets = Buckets(
                Occurrences.of([q for q, _ in places], self.tokens, self.device),
                Occurrences.of([k for _, k in places], self.tokens, self.device),
                [(*q.shape, k.shape[1]) for q, k in places],
                [(torch.from_numpy(q).to(self.device), torch.from_numpy(k).to(self.device)) for q, k in places],
            )
        return self._buckets

    def masks(self, window: int | None) -> list[Tensor]:
        """Return one mask per bucket, [b, 1, Lq, Lk], for full attention (None) or a sliding window of so many tokens.

        A mask is bool, True where a query sees a key. With at most SHORT_KEYS keys it is float32, to be added to the
        scores: 0 where a query sees a key, otherwise -inf.
        """
        if window not in self._masks:
            self._masks[window] = [self._mask(q, k, window) for q, k in self.buckets.places]
        return self._masks[window]

    def _mask(self, q: Tensor, k: Tensor, window: int | None) -> Tensor:
        visible = self.sees(q.clamp(min=0)[:, :, None], k.clamp(min=0)[:, None, :], window) & (k >= 0)[:, None, :]
        visible[..., 0] |= q < 0  # padding sees one key, so that no softmax is empty
        if k.shape[1] > SHORT_KEYS:
            return visible[:, None]
        return torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, -torch.inf)[:, None]

    def block_mask(self, window: int | None) -> Any:
        """Return flex_attention's block mask, made directly from the segments."""
        from torch.nn.attention.flex_attention import BlockMask

        if window not in self._block_masks:
            needed = torch.from_numpy(_needed_blocks(self._segments, self.tokens))
            self._block_masks[window] = BlockMask.from_kv_blocks(
                needed.sum(1, dtype=torch.int32)[None, None].to(self.device),
                needed.int().argsort(dim=1, descending=True, stable=True).int()[None, None].to(self.device),
                BLOCK_SIZE=BLOCK,
                mask_mod=lambda batch, head, q, k: self.sees(q, k, window),
                seq_lengths=(self.tokens, self.tokens),
            )
        return self._block_masks[window]


def _rows(segments: Sequence[Segment]) -> list[tuple[Ints, Ints]]:
    """Return (query tokens, key tokens) of every row.

    A prompt and its responses are one row while they are short together: then no token occurs twice. Otherwise every
    segment is a row that repeats its prefix.
    """
    families: dict[int, list[Segment]] = {}
    for s in segments:
        families.setdefault(s.prefix_start if s.prefix_length else s.start, []).append(s)
    rows = []
    for family in families.values():
        short = sum(s.length for s in family) <= SHORT_KEYS
        for members in [family] if short else [[s] for s in family]:
            queries = np.concatenate([np.arange(s.start, s.start + s.length) for s in members])
            prefixes = {(s.prefix_start, s.prefix_start + s.prefix_length) for s in members}
            keys = np.unique(np.concatenate([queries, *(np.arange(*prefix) for prefix in prefixes)]))
            rows.append((queries, keys))
    return rows


def _group_by_shape(rows: list[tuple[Ints, Ints]], waste: float = 0.25) -> list[list[tuple[Ints, Ints]]]:
    """Group rows so that a group's padded area (queries * keys) exceeds the sum of its rows by at most `waste`."""
    groups: list[list[tuple[Ints, Ints]]] = []
    longest = area = 0
    for row in sorted(rows, key=lambda row: (-len(row[0]), -len(row[1]), int(row[0][0]))):
        queries, keys = len(row[0]), len(row[1])
        if groups:
            wider = max(longest, keys)
            if len(groups[-1][0][0]) * wider * (len(groups[-1]) + 1) <= (1 + waste) * (area + queries * keys):
                groups[-1].append(row)
                longest, area = wider, area + queries * keys
                continue
        groups.append([row])
        longest, area = keys, queries * keys
    return groups


def _padded(rows: list[Ints]) -> Ints:
    """Return the rows as one array [b, longest] int64, with -1 as padding."""
    out = np.full((len(rows), max(len(row) for row in rows)), -1, dtype=np.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def _needed_blocks(segments: Sequence[Segment], tokens: int) -> np.ndarray:
    """Return which blocks of queries see any key of which blocks of keys: [T / 128, T / 128] bool."""
    blocks = -(-tokens // BLOCK)
    needed = np.zeros((blocks, blocks), dtype=bool)
    for s in segments:
        rows = slice(s.start // BLOCK, (s.start + s.length - 1) // BLOCK + 1)
        needed[rows, rows] |= np.tri(rows.stop - rows.start, dtype=bool)
        if s.prefix_length:
            needed[rows, s.prefix_start // BLOCK : (s.prefix_start + s.prefix_length - 1) // BLOCK + 1] = True
    return needed
