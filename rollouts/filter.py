"""Group filters decide which responses are trained on. They run on whole scored groups, before any advantage."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from configs.blocks.objective import Filter
from plugins.kinds import find, labels
from records.rollout import Group


@dataclass(frozen=True)
class GroupFilter:
    """One entry of rollout.filters, ready to run: `function(group, **params)` is True where it keeps.

    It answers for the whole group with a bool, or for its trajectories with a list of them.
    """

    name: str  # as in the metrics: the function's, numbered from its second use on
    function: Callable[..., Any]
    params: dict[str, Any]
    refill: bool
    in_baseline: bool


def filters_of(blocks: Sequence[Filter]) -> list[GroupFilter]:
    """Return the configured filters in order. Raise ValueError when one is not found."""
    found = []
    for block, name in zip(blocks, labels([block.function for block in blocks]), strict=True):
        function = find("filter", block.function)
        refill = getattr(function, "refill", False) if block.refill is None else block.refill
        found.append(GroupFilter(name, function, dict(block.params), refill, block.in_baseline))
    return found


def apply_filters(filters: Sequence[GroupFilter], groups: Sequence[Group]) -> list[GroupFilter | None]:
    """Mark what the filters leave out, in the trajectories; return the filter that left each group out whole, or None.

    The filters run in order, and each judges only what the ones before it left in. A group without any scored response
    is not judged (its errors are counted elsewhere), nor is one with a reward that is Inf or NaN: the update must see
    it.

    Raises:
        ValueError: a filter raised, or its answer is neither a bool nor a bool per trajectory.
    """
    return [_filtered(filters, group) if _is_judged(group) else None for group in groups]


def _is_judged(group: Group) -> bool:
    rewards = [t.reward for t in group.trajectories if t.reward is not None]
    return bool(rewards) and all(math.isfinite(reward) for reward in rewards)


def _filtered(filters: Sequence[GroupFilter], group: Group) -> GroupFilter | None:
    for used in filters:
        kept = _kept(used, group)
        for trajectory, keep in zip(group.trajectories, kept, strict=True):
            if not keep and trajectory.reward is not None and trajectory.dropped_by is None:
                trajectory.dropped_by, trajectory.in_baseline = used.name, used.in_baseline
        if not group.trained:
            for trajectory in group.trajectories:  # a group that is out whole has no baseline that anyone uses
                trajectory.in_baseline = False
            return used
    return None


def _kept(used: GroupFilter, group: Group) -> list[bool]:
    """Return a filter's answer as one flag per trajectory."""
    what = f"filter '{used.name}' on prompt {group.prompt.prompt_id}"
    try:
        answer = used.function(group, **used.params)
    except Exception as error:  # a user's own function
        raise ValueError(f"{what}: {type(error).__name__}: {error}") from error
    flags = [answer] * len(group.trajectories) if isinstance(answer, bool | np.bool_) else answer
    is_list = isinstance(flags, list | tuple | np.ndarray)
    if not (is_list and len(flags) == len(group.trajectories) and all(isinstance(f, bool | np.bool_) for f in flags)):
        raise ValueError(
            f"{what}: it returned {str(answer)[:80]!r}; it must return a bool, or a list of {len(group.trajectories)} "
            "bools, one per trajectory (True keeps)"
        )
    return [bool(flag) for flag in flags]
