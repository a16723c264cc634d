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

from rollouts.records import Trajectory

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

    prompt_ids: Ints
    bodies: tuple[bytes, ...]  # distinct response inputs, int64 tokens; none is a prefix of another
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
    members = [i for i, t in enumerate(trajectories) if t.action_tokens]
    if not members:
        return [[] for _ in range(ranks)]
    if share_prompts:
        by_group: dict[int, list[int]] = {}
        for i in members:
            by_group.setdefault(int(groups[i]), []).append(i)
        limit = sys.maxsize if whole_groups else max_tokens
        units = [unit for group in by_group.values() for unit in _shared_units(trajectories, group, limit)]
    else:
        units = [_unit(trajectories, [i]) for i in members]
    bins = _balance(units, max_tokens, ranks)
    per_token = {"advantages": advantages, "loss_weights": loss_weights, **(columns or {})}
    dummy = _dummy(trajectories[members[0]], per_token)
    batches = [
        _micro_batch(trajectories, content, groups, per_token, version) if content else dummy for content in bins
    ]
    return [batches[rank::ranks] for rank in range(ranks)]


def _body(trajectory: Trajectory) -> bytes:
    """Response tokens that are inputs: up to the one before the last action token, which is only predicted."""
    last_action = int(np.flatnonzero(trajectory.is_action)[-1])
    return np.asarray(trajectory.token_ids[:last_action], dtype=np.int64).tobytes()


def _distinct(bodies: list[bytes]) -> list[bytes]:
    """Longest first, without repeats and without prefixes of another: their positions can be shared."""
    kept: list[bytes] = []
    for body in sorted(set(bodies), key=lambda b: (-len(b), b)):
        if body and not any(longer.startswith(body) for longer in kept):
            kept.append(body)
    return kept


def _unit(trajectories: Sequence[Trajectory], members: list[int]) -> _Unit:
    prompt_ids = np.asarray(trajectories[members[0]].prompt_ids, dtype=np.int64)
    if not len(prompt_ids):
        raise ValueError(f"trajectory {trajectories[members[0]].group_id}: its prompt has no tokens to predict from")
    bodies = _distinct([_body(trajectories[i]) for i in members])
    return _Unit(prompt_ids, tuple(bodies), tuple(members), len(prompt_ids) + sum(len(b) for b in bodies) // 8)


def _shared_units(trajectories: Sequence[Trajectory], members: list[int], max_tokens: int) -> list[_Unit]:
    """A group as few units as the budget allows; equal and nested responses stay together."""
    prompt_ids = trajectories[members[0]].prompt_ids
    for i in members:
        if not np.array_equal(trajectories[i].prompt_ids, prompt_ids):
            raise ValueError(
                f"group {trajectories[i].group_id}: its trajectories differ in prompt; share_prompts must be off"
            )
    bodies = {i: _body(trajectories[i]) for i in members}
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
    return [_unit(trajectories, sorted(chunk)) for chunk in chunks]


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
    units: list[_Unit],
    groups: NDArray[np.integer],
    per_token: Mapping[str, Sequence[Any] | NDArray[np.floating]],
    version: int,
) -> MicroBatch:
    input_ids: list[Ints] = []
    position_ids: list[Ints] = []
    segments: list[Segment] = []
    predict: list[Ints] = []
    members: list[int] = []
    total = 0
    for unit in units:
        prompt = len(unit.prompt_ids)
        prompt_start = total
        lone = len(unit.bodies) <= 1  # nobody to share with: prompt and response are one causal segment
        starts: dict[bytes, int] = {}
        input_ids.append(unit.prompt_ids)
        position_ids.append(np.arange(prompt, dtype=np.int64))
        total += prompt
        if not lone:
            segments.append(Segment(prompt_start, prompt))
        for body in unit.bodies:
            tokens = np.frombuffer(body, dtype=np.int64)
            input_ids.append(tokens)
            position_ids.append(np.arange(prompt, prompt + len(tokens), dtype=np.int64))
            starts[body] = total
            if not lone:
                segments.append(Segment(total, len(tokens), prompt_start, prompt))
            total += len(tokens)
        if lone:
            segments.append(Segment(prompt_start, total - prompt_start))
        for i in unit.members:
            own = _body(trajectories[i])
            start = next((starts[body] for body in unit.bodies if body.startswith(own)), prompt_start + prompt)
            action = np.flatnonzero(trajectories[i].is_action)
            predict.append(np.where(action == 0, prompt_start + prompt - 1, start + action - 1).astype(np.int64))
            members.append(i)

    index = np.asarray(members, dtype=np.int64)
    chosen = [trajectories[i] for i in members]
    counts = np.asarray([t.action_tokens for t in chosen])
    columns = {
        name: np.concatenate(
            [np.broadcast_to(values[i], count) for i, count in zip(members, counts, strict=True)]
        ).astype(np.float32)
        for name, values in per_token.items()
    }
    staleness = version - np.concatenate([t.versions[t.is_action] for t in chosen]).astype(np.int64)
    assert (staleness >= 0).all(), "a token is newer than the policy"
    return MicroBatch(
        input_ids=np.concatenate(input_ids),
        position_ids=np.concatenate(position_ids),
        segments=tuple(segments),
        predict=np.concatenate(predict),
        targets=np.concatenate([t.token_ids[t.is_action] for t in chosen]).astype(np.int64),
        behavior_logprobs=np.concatenate([t.behavior_logprobs[t.is_action] for t in chosen]).astype(np.float32),
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
