"""What engines are asked in a step, and what comes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from records.rollout import Group, Prompt, Trajectory
from rollouts.worker import GroupRequest


@dataclass(frozen=True)
class Rollouts:
    """The responses of one round of askings from all engines."""

    groups: list[Group]
    generate_seconds: float
    reward_seconds: float

    @property
    def trajectories(self) -> list[Trajectory]:
        return [t for group in self.groups for t in group.trajectories]


def step_requests(
    prompts: list[Prompt], samples: int, label: str, earlier: Iterable[Prompt], oldest_version: int = 0
) -> list[GroupRequest]:
    """One asking per prompt, each with an id and seeds that no other asking of the step has."""
    times = Counter(prompt.prompt_id for prompt in earlier)
    requests = []
    for prompt in prompts:
        first_sample = samples * times[prompt.prompt_id]
        requests.append(GroupRequest(f"{label}-{times.total()}", prompt, samples, first_sample, oldest_version))
        times[prompt.prompt_id] += 1
    return requests
