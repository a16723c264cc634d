"""The requests to engines in a step, and the groups that are waited for by their ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from records.rollout import Group, Prompt
from rollouts.vllm.sampling import Sampling
from rollouts.worker import GroupRequest


def step_requests(
    prompts: list[Prompt],
    samples: int,
    sampling: Sampling,
    step: int,
    label: str,
    earlier: Iterable[Prompt] = (),
    oldest_version: int = 0,
) -> list[GroupRequest]:
    """Return one request per prompt, each with an id and seeds that no other request of the step has.

    earlier: prompts requested in this step before. Group ids continue from there, and a prompt that is requested again,
    also within `prompts`, gets samples of other seeds.
    """
    times = Counter(prompt.prompt_id for prompt in earlier)
    requests = []
    for prompt in prompts:
        first_sample = samples * times[prompt.prompt_id]
        group_id = f"{label}-{step}-{times.total()}"
        requests.append(GroupRequest(group_id, prompt, samples, sampling, step, first_sample, oldest_version))
        times[prompt.prompt_id] += 1
    return requests


class AwaitedGroups:
    """The groups of some requests, picked out of all that come."""

    def __init__(self, requests: list[GroupRequest]) -> None:
        self._ids = [request.group_id for request in requests]
        self._missing = set(self._ids)
        self._groups: dict[str, Group] = {}

    def take(self, groups: list[Group]) -> list[Group]:
        """Keep the awaited groups and return the others."""
        self._groups |= {group.group_id: group for group in groups if group.group_id in self._missing}
        self._missing -= self._groups.keys()
        return [group for group in groups if group.group_id not in self._groups]

    @property
    def is_complete(self) -> bool:
        return not self._missing

    @property
    def groups(self) -> list[Group]:
        """Return all awaited groups, in the order of the requests."""
        return [self._groups[group_id] for group_id in self._ids]
