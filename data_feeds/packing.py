"""Packing: a step's trajectories become micro-batches of real tokens, without padding, balanced over ranks.

Two layouts. Plain: one segment per trajectory. Shared: a group's prompt is one segment, computed once, and each distinct
response is a segment that also sees the prompt. Everything is numpy, so that a micro-batch ships cheaply.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_feeds.responses import Responses
from records.rollout import Trajectory

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
    behavior_logprobs: Floats  # [N]
    advantages: Floats  # [N]
    loss_weights: Floats  # [N]
    sequence: Ints  # [N] in 0..S-1
    staleness: Ints  # [N] policy versions between sampling and now
    group: Ints  # [S] as given to pack()
    trajectory_index: Ints  # [S] position in the list given to pack(); DUMMY in a dummy
    rewards: Floats  # [S] NaN where there is none; nothing trains on it, people look at it
    columns: Mapping[str, Floats] = field(default_factory=dict)  # [N] each: what pack() was given beside the advantages
    chosen: NDArray[np.bool_] | None = None  # [S] of preference data: the preferred response, or a desirable one
    images: tuple[Any, ...] = ()  # inputs of vision-language models

    @property
    def tokens(self) -> int:
        return len(self.input_ids)

    def with_columns(self, columns: Mapping[str, Floats]) -> MicroBatch:
        """The same with further numbers of its action tokens, [N] each."""
        return replace(self, columns={**self.columns, **columns})

    def by_trajectory(self, values: Floats) -> Iterator[tuple[int, Floats]]:
        """Each trajectory's position in the list given to pack() and its part of `values`, [N]; nothing of a dummy."""
        for row, index in enumerate(self.trajectory_index):
            if index != DUMMY:
                yield int(index), values[self.sequence == row]

    @property
    def is_dummy(self) -> bool:
        """Only there so that all ranks run the same number of passes: weight 0, to be left out of every metric."""
        return bool((self.trajectory_index == DUMMY).all())


@dataclass(frozen=True)
class _Unit:
    """Trajectories that are packed together: one, or (part of) a group around one prompt."""

    prompt: bytes  # int64 tokens, and so are the bodies
    bodies: tuple[bytes, ...]  # distinct response inputs; none is a prefix of another
    members: tuple[int, ...]  # trajectory indices
    tokens: int


def pack(
    trajectories: Sequence[Trajectory],
    groups: NDArray[np.integer],
    advantages: Sequence[Any] | NDArray[np.floating],
    loss_weights: NDArray[np.floating],
    version: int,
    max_tokens: int,
    ranks: int,
    share_prompts: bool,
    columns: Mapping[str, Sequence[NDArray[np.floating]]] | None = None,
    whole_groups: bool = False,
) -> list[list[MicroBatch]]:
    """Split trajectories into micro-batches: a list per rank, all lists of the same length. Deterministic.

    groups, advantages and loss_weights have one entry per trajectory; the weight is that of each of its tokens, and an
    advantage may be one number or one for each action token. `columns` are further numbers of every action token, a list of
    arrays each, by name.
    `version` is the policy's now. A micro-batch holds at most `max_tokens` input tokens, except that a trajectory longer
    than that gets one of its own. A group too big for the budget is split and its prompt repeated, unless `whole_groups`
    keeps its members together whatever they take, as pairs must be (then `share_prompts` must be on). Trajectories without
    action tokens are left out. Ranks that would lack a micro-batch get a dummy of weight 0.

    Raises:
        ValueError: a prompt is empty, arrays differ in length, or the trajectories of a group differ in prompt.
    """
    if not len(trajectories) == len(groups) == len(advantages) == len(loss_weights):
        raise ValueError("groups, advantages and loss_weights need one entry per trajectory")
    assert share_prompts or not whole_groups, "only groups around one prompt are kept together"
    if max_tokens < 1 or ranks < 1:
        raise ValueError(f"max_tokens ({max_tokens}) and ranks ({ranks}) must be at least 1")
    responses = Responses(trajectories) if trajectories else None
    if responses is None or not responses.counts.any():
        return [[] for _ in range(ranks)]
    members: list[int] = np.flatnonzero(responses.counts).tolist()
    bodies = responses.bodies()
    if share_prompts:
        by_group: dict[int, list[int]] = {}
        for i in members:
            by_group.setdefault(int(groups[i]), []).append(i)
        limit = sys.maxsize if whole_groups else max_tokens
        units = [unit for group in by_group.values() for unit in _shared_units(trajectories, bodies, group, limit)]
    else:
        units = [_unit(trajectories, bodies, [i]) for i in members]
    bins = _balance(units, max_tokens, ranks)
    per_token = {"advantages": advantages, "loss_weights": loss_weights, **(columns or {})}
    dummy = _dummy(trajectories[members[0]], per_token)
    batches = [
        _micro_batch(trajectories, responses, bodies, content, groups, per_token, version) if content else dummy
        for content in bins
    ]
    return [batches[rank::ranks] for rank in range(ranks)]


def _distinct(bodies: list[bytes]) -> list[bytes]:
    """Longest first, without repeats and without prefixes of another: their positions can be shared."""
    kept: list[bytes] = []
    for body in sorted(set(bodies), key=lambda b: (-len(b), b)):
        if body and not any(longer.startswith(body) for longer in kept):
            kept.append(body)
    return kept


def _unit(trajectories: Sequence[Trajectory], bodies: list[bytes], members: list[int]) -> _Unit:
    prompt = np.asarray(trajectories[members[0]].prompt_ids, dtype=np.int64).tobytes()
    if not prompt:
        raise ValueError(f"trajectory {trajectories[members[0]].group_id}: its prompt has no tokens to predict from")
    distinct = _distinct([bodies[i] for i in members])
    return _Unit(prompt, tuple(distinct), tuple(members), (len(prompt) + sum(map(len, distinct))) // 8)


def _shared_units(
    trajectories: Sequence[Trajectory], bodies: list[bytes], members: list[int], max_tokens: int
) -> list[_Unit]:
    """A group as few units as the budget allows; equal and nested responses stay together."""
    prompt_ids = trajectories[members[0]].prompt_ids
    for i in members:
        own = trajectories[i].prompt_ids  # mostly the very same array, which is quick to see
        if own is not prompt_ids and not np.array_equal(own, prompt_ids):
            raise ValueError(
                f"group {trajectories[i].group_id}: its trajectories differ in prompt; share_prompts must be off"
            )
    if len(prompt_ids) + sum(len(bodies[i]) for i in members) // 8 <= max_tokens:
        return [_unit(trajectories, bodies, members)]
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
    return [_unit(trajectories, bodies, sorted(chunk)) for chunk in chunks]


def _balance(units: list[_Unit], max_tokens: int, ranks: int) -> list[list[_Unit]]:
    """Units into ranks * m bins within the budget, m as small as greedy balancing allows.

    Bins come sorted by load, largest first: dealt out in turn, ranks carry about the same and run out of memory early
    or never.
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
    trajectories: Sequence[Trajectory],
    responses: Responses,
    bodies: list[bytes],
    units: list[_Unit],
    groups: NDArray[np.integer],
    per_token: Mapping[str, Sequence[Any] | NDArray[np.floating]],
    version: int,
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
    actions = responses.actions(members)
    within = actions - np.repeat(responses.starts[index], counts)  # place in its own response
    staleness = version - responses.versions[actions].astype(np.int64)
    assert (staleness >= 0).all(), "a token is newer than the policy"
    columns = {name: _by_token(values, members, counts) for name, values in per_token.items()}
    chosen = [trajectories[i] for i in members]
    return MicroBatch(
        input_ids=np.frombuffer(bytearray().join(pieces), dtype=np.int64),
        position_ids=np.arange(total, dtype=np.int64) + np.repeat(np.asarray(firsts) - before, sizes),
        segments=tuple(segments),
        predict=np.where(within == 0, np.repeat(prompt_ends, counts), np.repeat(body_starts, counts) + within) - 1,
        targets=responses.token_ids[actions],
        behavior_logprobs=responses.behavior_logprobs[actions].astype(np.float32),
        advantages=columns.pop("advantages"),
        loss_weights=columns.pop("loss_weights"),
        sequence=np.repeat(np.arange(len(members), dtype=np.int64), counts),
        staleness=staleness,
        group=np.asarray(groups)[index].astype(np.int64),
        trajectory_index=index,
        rewards=np.asarray([np.nan if t.reward is None else t.reward for t in chosen], dtype=np.float32),
        columns=columns,
        chosen=None if chosen[0].chosen is None else np.asarray([t.chosen for t in chosen], dtype=np.bool_),
        images=tuple(image for t in chosen for image in t.prompt.images),
    )


def _by_token(values: Sequence[Any] | NDArray[np.floating], members: list[int], counts: Ints) -> Floats:
    """What trajectories were given, one number each or one for every action token, by action token. [N]"""
    if isinstance(values, np.ndarray) and values.ndim == 1:
        return np.repeat(values[members], counts).astype(np.float32)
    own = [np.asarray(values[i]) for i in members]
    if [v.shape for v in own] != [(count,) for count in counts.tolist()]:
        own = [np.broadcast_to(v, count) for v, count in zip(own, counts, strict=True)]
    return np.concatenate(own).astype(np.float32)


def _dummy(like: Trajectory, per_token: Mapping[str, Any]) -> MicroBatch:
    """One real token that predicts itself with weight 0."""
    token = np.asarray(like.prompt_ids[-1:], dtype=np.int64)
    zeros = np.zeros(1, dtype=np.int64)
    return MicroBatch(
        input_ids=token,
        position_ids=zeros,
        segments=(Segment(0, 1),),
        predict=zeros,
        targets=token,
        behavior_logprobs=np.zeros(1, dtype=np.float32),
        advantages=np.zeros(1, dtype=np.float32),
        loss_weights=np.zeros(1, dtype=np.float32),
        sequence=zeros,
        staleness=zeros,
        group=zeros,
        trajectory_index=np.full(1, DUMMY, dtype=np.int64),
        rewards=np.full(1, np.nan, dtype=np.float32),
        columns={n: np.zeros(1, dtype=np.float32) for n in per_token if n not in ("advantages", "loss_weights")},
    )
