"""Packing: a step's trajectories become micro-batches of real tokens, without padding, balanced over ranks.

Two layouts. Plain: one segment per trajectory. Shared: a group's prompt is one segment, computed once, and each
distinct response is a segment that also sees the prompt. Everything is numpy, so that a micro-batch ships cheaply."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_feeds.responses import Responses, TokenColumns

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

DUMMY = -1  # trajectory_index of a micro-batch that only keeps ranks in step


class Segment(NamedTuple):
    """A run of packed tokens. Its queries see themselves causally and, when prefix_length > 0, all of the prefix."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """One packed forward pass: T input tokens, N action tokens to be scored, S trajectories. There is no padding.

    With a shared prompt the first action token of every response is predicted at the last prompt position, and equal
    responses share their positions too: `predict` may repeat.
    """

    input_ids: Ints  # [T]
    position_ids: Ints  # [T] restart with every sequence; a response's continue its prompt's
    segments: tuple[Segment, ...]  # disjoint, covering 0..T-1 in order
    predict: Ints  # [N] position whose logits predict the action token
    targets: Ints  # [N] the action token
    loss_weights: Floats  # [N]
    sequence: Ints  # [N] in 0..S-1, in order
    columns: TokenColumns  # [N] each; 0 in a dummy
    group: Ints  # [S] as given to pack()
    trajectory_index: Ints  # [S] position among the trajectories given to pack(); DUMMY in a dummy
    rewards: Floats  # [S] NaN where there is none; nothing trains on it, people look at it
    chosen: NDArray[np.bool_] | None = None  # [S] of preference data: the preferred response, or a desirable one
    images: tuple[Any, ...] = ()  # inputs of vision-language models

    @property
    def tokens(self) -> int:
        return len(self.input_ids)

    def with_columns(self, columns: Mapping[str, NDArray[Any]]) -> MicroBatch:
        """Return the micro-batch with more columns of its action tokens, [N] each, which may replace those it has."""
        return replace(self, columns={**self.columns, **columns})

    def by_trajectory(self, values: Floats) -> Iterator[tuple[int, Floats]]:
        """Yield for each trajectory its position among those given to pack() and its part of `values`, [N], but no
        dummy."""
        if not self.is_dummy:
            parts = np.split(values, np.searchsorted(self.sequence, np.arange(1, len(self.group))))
            yield from zip(self.trajectory_index.tolist(), parts, strict=True)

    @property
    def is_dummy(self) -> bool:
        """Return whether it only fills up a rank's number of passes, with weight 0. No metric may count it."""
        return bool((self.trajectory_index == DUMMY).all())


@dataclass(frozen=True)
class _Unit:
    """Trajectories that are packed together: one, or (part of) a group around one prompt."""

    prompt: bytes  # int64 tokens, and so are the bodies
    bodies: tuple[bytes, ...]  # distinct response inputs; none is a prefix of another
    members: tuple[int, ...]  # trajectory indices
    tokens: int


def pack(
    responses: Responses,
    groups: NDArray[np.integer],
    loss_weights: NDArray[np.floating],
    columns: TokenColumns,
    max_tokens: int,
    ranks: int,
    share_prompts: bool,
    whole_groups: bool = False,
) -> list[list[MicroBatch]]:
    """Split trajectories into micro-batches: a list per rank, all lists of the same length. Deterministic.

    groups and loss_weights have one entry per trajectory; the weight is that of each of its tokens. Trajectories of
    weight 0 and those without action tokens are left out. A micro-batch holds at most `max_tokens` input tokens, except
    that a trajectory longer than that gets one of its own. A group too big for the budget is split and its prompt
    repeated, unless `whole_groups` keeps its members together whatever they take, as pairs must be (then
    `share_prompts` must be on). Ranks that would lack a micro-batch get a dummy of weight 0.

    Raises:
        ValueError: a prompt is empty, arrays differ in length, or the trajectories of a group differ in prompt.
    """
    if not len(responses.counts) == len(groups) == len(loss_weights):
        raise ValueError("groups and loss_weights need one entry per trajectory")
    if wrong := [name for name, values in columns.items() if len(values) != len(responses.actions)]:
        raise ValueError(f"{', '.join(wrong)}: a column needs one entry per action token")
    assert share_prompts or not whole_groups, "only groups around one prompt are kept together"
    if max_tokens < 1 or ranks < 1:
        raise ValueError(f"max_tokens ({max_tokens}) and ranks ({ranks}) must be at least 1")
    members: list[int] = np.flatnonzero((responses.counts > 0) & (loss_weights != 0)).tolist()
    if not members:
        return [[] for _ in range(ranks)]
    bodies = responses.bodies()
    if share_prompts:
        by_group: dict[int, list[int]] = {}
        for i in members:
            by_group.setdefault(int(groups[i]), []).append(i)
        limit = sys.maxsize if whole_groups else max_tokens
        units = [unit for group in by_group.values() for unit in _shared_units(responses, bodies, group, limit)]
    else:
        units = [_unit(responses, bodies, [i]) for i in members]
    bins = _balance(units, max_tokens, ranks)
    columns = {name: _for_trainer(values) for name, values in columns.items()}
    dummy = _dummy(responses.trajectories[members[0]].prompt_ids[-1:].astype(np.int64), columns)
    batches = [
        _micro_batch(responses, bodies, content, groups, loss_weights, columns) if content else dummy
        for content in bins
    ]
    return [batches[rank::ranks] for rank in range(ranks)]


def _for_trainer(values: NDArray[Any]) -> NDArray[Any]:
    """Return a column in the types that losses work with: float32, or int64 for whole numbers."""
    return values.astype(np.int64 if np.issubdtype(values.dtype, np.integer) else np.float32, copy=False)


def _distinct(bodies: list[bytes]) -> list[bytes]:
    """Return the longest first, without repeats and without prefixes of another: their positions can be shared."""
    kept: list[bytes] = []
    for body in sorted(set(bodies), key=lambda b: (-len(b), b)):
        if body and not any(longer.startswith(body) for longer in kept):
            kept.append(body)
    return kept


def _unit(responses: Responses, bodies: list[bytes], members: list[int]) -> _Unit:
    first = responses.trajectories[members[0]]
    prompt = np.asarray(first.prompt_ids, dtype=np.int64).tobytes()
    if not prompt:
        raise ValueError(f"trajectory {first.group_id}: its prompt has no tokens to predict from")
    distinct = _distinct([bodies[i] for i in members])
    return _Unit(prompt, tuple(distinct), tuple(members), (len(prompt) + sum(map(len, distinct))) // 8)


def _shared_units(responses: Responses, bodies: list[bytes], members: list[int], max_tokens: int) -> list[_Unit]:
    """Return a group as as few units as the budget allows; equal and nested responses stay together."""
    trajectories = responses.trajectories
    prompt_ids = trajectories[members[0]].prompt_ids
    for i in members:
        own = trajectories[i].prompt_ids  # mostly the very same array, which is quick to see
        if own is not prompt_ids and not np.array_equal(own, prompt_ids):
            raise ValueError(
                f"group {trajectories[i].group_id}: its trajectories differ in prompt; share_prompts must be off"
            )
    if len(prompt_ids) + sum(len(bodies[i]) for i in members) // 8 <= max_tokens:
        return [_unit(responses, bodies, members)]
    chunks: list[list[int]] = []
    used = max_tokens  # forces a first chunk
    kept: list[bytes] = []
    # Reverse lexicographic order puts a response right after those it is a prefix of.
    for i in sorted(members, key=lambda i: (bodies[i], -i), reverse=True):
        nested = any(longer.startswith(bodies[i]) for longer in kept)
        cost = 0 if nested else len(bodies[i]) // 8
        if not chunks or used + cost > max_tokens:
            chunks.append([])
            used, kept, cost = len(prompt_ids), [], len(bodies[i]) // 8
        chunks[-1].append(i)
        kept.append(bodies[i])
        used += cost
    return [_unit(responses, bodies, sorted(chunk)) for chunk in chunks]


def _balance(units: list[_Unit], max_tokens: int, ranks: int) -> list[list[_Unit]]:
    """Divide units into ranks * m bins within the budget, where m is as small as greedy balancing allows.

    The bins are sorted by load, largest first. When ranks get them in turn, their loads are about equal, and a lack of
    memory shows early or never.
    """
    order = sorted(range(len(units)), key=lambda u: (-units[u].tokens, units[u].members))
    total = sum(min(unit.tokens, max_tokens) for unit in units)
    rounds = -(-total // (max_tokens * ranks))
    while True:
        bins: list[list[_Unit]] = [[] for _ in range(rounds * ranks)]
        heap = [(0, b) for b in range(len(bins))]
        fits = True
        for u in order:
            load, b = heapq.heappop(heap)
            if load and load + units[u].tokens > max_tokens:
                fits = False
                break
            bins[b].append(units[u])
            heapq.heappush(heap, (load + units[u].tokens, b))
        if fits:
            return sorted(bins, key=lambda content: -sum(unit.tokens for unit in content))
        rounds += 1


def _micro_batch(
    responses: Responses,
    bodies: list[bytes],
    units: list[_Unit],
    groups: NDArray[np.integer],
    loss_weights: NDArray[np.floating],
    columns: TokenColumns,
) -> MicroBatch:
    pieces: list[bytes] = []  # prompts and bodies in order
    firsts: list[int] = []  # position of each piece's first token within its sequence
    segments: list[Segment] = []
    members: list[int] = []
    prompt_ends: list[int] = []  # of each member, in the packed tokens; the same for the beginning of its body
    body_starts: list[int] = []
    total = 0
    for unit in units:
        prompt, prompt_start = len(unit.prompt) // 8, total
        lone = len(unit.bodies) <= 1  # nobody to share with: prompt and response are one causal segment
        starts: dict[bytes, int] = {}
        pieces.append(unit.prompt)
        firsts.append(0)
        total += prompt
        if not lone:
            segments.append(Segment(prompt_start, prompt))
        for body in unit.bodies:
            pieces.append(body)
            firsts.append(prompt)
            starts[body] = total
            if not lone:
                segments.append(Segment(total, len(body) // 8, prompt_start, prompt))
            total += len(body) // 8
        if lone:
            segments.append(Segment(prompt_start, total - prompt_start))
        for i in unit.members:
            start = starts.get(bodies[i])
            if start is None:  # the beginning of another, or empty
                start = next((starts[b] for b in unit.bodies if b.startswith(bodies[i])), prompt_start + prompt)
            members.append(i)
            prompt_ends.append(prompt_start + prompt)
            body_starts.append(start)

    sizes = np.asarray([len(piece) // 8 for piece in pieces])
    before = np.cumsum(sizes) - sizes
    index = np.asarray(members, dtype=np.int64)
    counts = responses.counts[index]
    order = responses.order(members)
    actions = responses.actions[order]
    within = actions - np.repeat(responses.starts[index], counts)  # place in its own response
    kept = [responses.trajectories[i] for i in members]
    return MicroBatch(
        input_ids=np.frombuffer(bytearray().join(pieces), dtype=np.int64),
        position_ids=np.arange(total, dtype=np.int64) + np.repeat(np.asarray(firsts) - before, sizes),
        segments=tuple(segments),
        predict=np.where(within == 0, np.repeat(prompt_ends, counts), np.repeat(body_starts, counts) + within) - 1,
        targets=responses.token_ids[actions],
        loss_weights=np.repeat(loss_weights[index].astype(np.float32), counts),
        sequence=np.repeat(np.arange(len(members), dtype=np.int64), counts),
        columns={name: values[order] for name, values in columns.items()},
        group=np.asarray(groups)[index].astype(np.int64),
        trajectory_index=index,
        rewards=np.asarray([np.nan if t.reward is None else t.reward for t in kept], dtype=np.float32),
        chosen=None if kept[0].chosen is None else np.asarray([t.chosen for t in kept], dtype=np.bool_),
        images=tuple(image for t in kept for image in t.prompt.images),
    )


def _dummy(token: Ints, columns: TokenColumns) -> MicroBatch:
    """Return one real token that predicts itself with weight 0."""
    zeros = np.zeros(1, dtype=np.int64)
    return MicroBatch(
        input_ids=token,
        position_ids=zeros,
        segments=(Segment(0, 1),),
        predict=zeros,
        targets=token,
        loss_weights=np.zeros(1, dtype=np.float32),
        sequence=zeros,
        columns={name: np.zeros(1, dtype=values.dtype) for name, values in columns.items()},
        group=zeros,
        trajectory_index=np.full(1, DUMMY, dtype=np.int64),
        rewards=np.full(1, np.nan, dtype=np.float32),
    )
