"""A feed whose engines answer from a script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from configs.blocks.rl import RLConfig
from configs.reading.load import method_for
from data_feeds.prompts.sampler import ShuffledPrompts
from orchestration.rl.rollout_queue import Batch, RolloutQueue
from orchestration.trainer.token_objective import TokenObjective
from records.rollout import Group, Prompt, Trajectory
from rollouts.vllm.sampling import Sampling
from rollouts.worker import GroupRequest

SAMPLES = 4
OVERLAP = {"mode": "overlap", "max_staleness": 1}


class ScriptedRollouts:
    """Answers from a script: `passes(prompt id, number of the asking)` responses of a group are paid 1, the others 0.

    With `hold`, asked groups are finished only when `finish` says so.
    """

    def __init__(self, passes: Callable[[str, int], int], hold: bool = False) -> None:
        self.passes, self.hold = passes, hold
        self.asked: list[list[GroupRequest]] = []  # per call
        self.seeds: list[int] = []
        self.version = 0
        self._held: list[Group] = []
        self._ready: list[Group] = []

    @property
    def group_ids(self) -> list[str]:
        return [request.group_id for call in self.asked for request in call]

    @property
    def prompt_ids(self) -> list[list[str]]:
        return [[request.prompt.prompt_id for request in call] for call in self.asked]

    def ask(self, requests: list[GroupRequest], sampling: Sampling, step: int) -> None:
        before = len(self.group_ids)
        for number, request in enumerate(requests, start=before):
            right = self.passes(request.prompt.prompt_id, number)
            made = [
                response(request.prompt, request.group_id, i, float(i < right), self.version)
                for i in range(request.samples)
            ]
            self._held.append(Group(request.group_id, request.prompt, made))
            self.seeds += [
                sampling.request_seed(step, request.prompt.prompt_id, request.first_sample + i)
                for i in range(request.samples)
            ]
        self.asked.append(requests)
        if not self.hold:
            self.finish(*(group.group_id for group in self._held))

    def finish(self, *names: str) -> None:
        done = [group for group in self._held if group.group_id in names]
        assert len(done) == len(names)
        self._held = [group for group in self._held if group.group_id not in names]
        self._ready += done

    def collect(self, wait_seconds: float) -> list[Group]:
        assert self._ready or wait_seconds == 0, "the feed waits for what nobody is making"
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
    return RLConfig.model_validate(
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
    )  # fmt: skip


def feed(
    passes: Callable[[str, int], int], filters: list[Any], prompts: int = 40, hold: bool = False, **of_job: Any
) -> tuple[RolloutQueue, ScriptedRollouts, list[str]]:
    notes: list[str] = []
    scripted = ScriptedRollouts(passes, hold)
    sampler = ShuffledPrompts([Prompt(f"p/{i}", []) for i in range(prompts)], seed=0)
    sampling = Sampling(max_new_tokens=8, seeded=True)
    config = job(filters, **of_job)
    return RolloutQueue(config, objective_of(config), scripted, sampler, sampling, notes.append), scripted, notes  # type: ignore[arg-type]


def objective_of(config: RLConfig) -> TokenObjective:
    return TokenObjective(method_for(config), config.objective)


def trained(batch: Batch) -> int:
    return sum(bool(group.trained) for group in batch.groups)
