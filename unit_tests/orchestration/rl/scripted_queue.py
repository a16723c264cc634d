"""A queue of rollouts whose engines answer from a script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from configs.blocks.rl import RLConfig
from configs.reading.load import checked, method_for
from data_feeds.prompts.sampler import ShuffledPrompts
from orchestration.rl.rollout_queue import Batch, RolloutQueue
from orchestration.trainer.token_objective import TokenObjective
from records.rollout import Group, Prompt, Trajectory
from rollouts.vllm.sampling import Sampling
from rollouts.worker import GroupRequest

SAMPLES = 4
OVERLAP = {"mode": "overlap", "max_staleness": 1}


class ScriptedPool:
    """Answers from a script: `passes(prompt id, number of the request)` responses of a group are paid 1, the others 0.

    With `hold`, groups are finished only when `finish` says so.
    """

    def __init__(self, passes: Callable[[str, int], int], hold: bool = False) -> None:
        self.passes, self.hold = passes, hold
        self.submitted: list[list[GroupRequest]] = []  # per call
        self.seeds: list[int] = []
        self.version = 0
        self._held: list[Group] = []
        self._ready: list[Group] = []

    @property
    def group_ids(self) -> list[str]:
        return [request.group_id for call in self.submitted for request in call]

    @property
    def prompt_ids(self) -> list[list[str]]:
        return [[request.prompt.prompt_id for request in call] for call in self.submitted]

    def submit(self, requests: list[GroupRequest]) -> None:
        before = len(self.group_ids)
        for number, request in enumerate(requests, start=before):
            right = self.passes(request.prompt.prompt_id, number)
            made = [
                response(request.prompt, request.group_id, i, float(i < right), self.version)
                for i in range(request.samples)
            ]
            self._held.append(Group(request.group_id, request.prompt, made))
            self.seeds += [
                request.sampling.request_seed(request.step, request.prompt.prompt_id, request.first_sample + i)
                for i in range(request.samples)
            ]
        self.submitted.append(requests)
        if not self.hold:
            self.finish(*(group.group_id for group in self._held))

    def finish(self, *names: str) -> None:
        done = [group for group in self._held if group.group_id in names]
        assert len(done) == len(names)
        self._held = [group for group in self._held if group.group_id not in names]
        self._ready += done

    def collect(self, wait_seconds: float) -> list[Group]:
        assert self._ready or wait_seconds == 0, "the queue waits for what nobody is making"
        ready, self._ready = self._ready, []
        return ready


def response(prompt: Prompt, group_id: str, sample: int, reward: float, version: int = 0) -> Trajectory:
    one = np.zeros(1, np.int32)
    return Trajectory(
        prompt, group_id, sample, one, one, np.zeros(1, np.float32), one + version, np.ones(1, np.bool_), one, reward=reward,
        reward_parts={"right": reward}, finish_reason="stop",
    )  # fmt: skip


def job(
    filters: list[Any], step_prompts: int = 4, schedule: dict[str, Any] | None = None, steps: int = 50,
    train: dict[str, Any] | None = None, **rollout: Any,
) -> RLConfig:  # fmt: skip
    return checked(RLConfig.model_validate(
        {
            "model": {"path": "none"},
            "data": {"sources": [{"reasoning_gym": "chain_sum"}]},
            "algorithm": {"name": "grpo"},
            "rollout": {
                "prompts_per_step": step_prompts, "responses_per_prompt": SAMPLES, "filters": filters, **rollout,
            },
            "reward": {"parts": [{"function": "last_number"}]},
            "schedule": schedule or {},
            "train": {"steps": steps, **(train or {})},
        }
    ))  # fmt: skip


def queue_of(
    passes: Callable[[str, int], int], filters: list[Any], prompts: int = 40, hold: bool = False, **of_job: Any
) -> tuple[RolloutQueue, ScriptedPool, list[str]]:
    notes: list[str] = []
    scripted = ScriptedPool(passes, hold)
    sampler = ShuffledPrompts([Prompt(f"p/{i}", []) for i in range(prompts)], seed=0)
    sampling = Sampling(max_new_tokens=8, seeded=True)
    config = job(filters, **of_job)
    return RolloutQueue(config, objective_of(config), scripted, sampler, sampling, notes.append), scripted, notes  # type: ignore[arg-type]


def objective_of(config: RLConfig) -> TokenObjective:
    return TokenObjective(method_for(config), config.objective)


def go_round(queue: RolloutQueue, version: int, wait_seconds: float = 0.0) -> None:
    """What the driver does while it waits, of the queue."""
    queue.submit(version)
    for group in queue.pool.collect(wait_seconds):
        queue.take_in(group)


def take(queue: RolloutQueue, version: int, round_: Callable[[float], None] | None = None) -> Batch:
    """The next batch, once it is complete. round_: what is done until then, in place of `go_round`."""
    while (batch := queue.take(version)) is None:
        if round_ is None:
            go_round(queue, version, 1.0)
        else:
            round_(1.0)
    return batch


def trained(batch: Batch) -> int:
    return sum(bool(group.trained) for group in batch.groups)
