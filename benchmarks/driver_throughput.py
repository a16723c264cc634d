"""Measure the driver alone: short trajectories per second from admission to packed micro-batches.

A scripted source stands in for the engines; no Ray, no model. What is timed is all that the driver does with a response
on its way to the trainer: admission, grouping of finished responses into Group records, filters, advantages (GRPO) and
packing. What engines and scorers do elsewhere (drawing tokens, making Trajectory records, rewards) is not timed.
The target is at least 20,000 trajectories a second with flat memory over a million.

    python -m benchmarks.driver_throughput             # a million trajectories, about two minutes on one core
    python -m benchmarks.driver_throughput --quick     # fewer, to see that it runs
    python -m benchmarks.driver_throughput --profile   # where the time goes
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import torch

from configs.blocks.rl import RLConfig
from configs.reading.load import checked, method_for
from orchestration.trainer.rl_batches import prepare_updates
from orchestration.trainer.token_objective import TokenObjective
from records.rollout import Group, Prompt, Trajectory
from rollouts.admission import Admission
from rollouts.filter import apply_filters, filters_of

TARGET_PER_SECOND = 20_000
MEMORY_POINTS = 10
VOCABULARY = 50_000


@dataclass(frozen=True)
class Shape:
    """The size of a step."""

    groups: int
    responses: int  # of each group
    prompt_tokens: int
    response_tokens: int  # longest; lengths are uniform from half of it


def job_config(shape: Shape) -> RLConfig:
    """Return GRPO with the filter for groups of equal rewards, on one trainer rank."""
    return checked(
        RLConfig.model_validate(
            {
                "model": {"path": "none"},
                "data": {"sources": [{"reasoning_gym": "chain_sum"}]},
                "algorithm": {"name": "grpo"},
                "rollout": {
                    "prompts_per_step": shape.groups,
                    "responses_per_prompt": shape.responses,
                    "max_new_tokens": shape.response_tokens,
                    "filters": [{"function": "zero_variance"}],
                },
                "reward": {"parts": [{"function": "ended"}]},
                "schedule": {"mode": "overlap", "max_staleness": 1},
                "train": {"max_tokens_per_micro_batch": 16_384},
            }
        )
    )


class ScriptedEngines:
    """Answer requests in a shuffled order, response by response, as a cluster of engines would."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape, self.rng = shape, np.random.default_rng(seed)
        self.running: list[Trajectory] = []

    def ask(self, group_ids: Sequence[str], version: int) -> None:
        for group_id in group_ids:
            prompt = Prompt(group_id, [])
            prompt_ids = self.rng.integers(0, VOCABULARY, self.shape.prompt_tokens, dtype=np.int32)
            self.running += [
                self._response(prompt, group_id, i, prompt_ids, version) for i in range(self.shape.responses)
            ]

    def answer(self) -> Iterator[Trajectory]:
        """Return all running responses, in random order."""
        order = self.rng.permutation(len(self.running))
        running, self.running = self.running, []
        return (running[i] for i in order)

    def _response(self, prompt: Prompt, group_id: str, sample: int, prompt_ids: np.ndarray, version: int) -> Trajectory:
        length = int(self.rng.integers(self.shape.response_tokens // 2, self.shape.response_tokens + 1))
        return Trajectory(
            prompt=prompt,
            group_id=group_id,
            sample=sample,
            prompt_ids=prompt_ids,
            token_ids=self.rng.integers(0, VOCABULARY, length, dtype=np.int32),
            behavior_logprobs=-self.rng.random(length, dtype=np.float32),
            versions=np.full(length, version, np.int32),
            is_action=np.ones(length, np.bool_),
            turn=np.zeros(length, np.int32),
            finish_reason="stop",
            reward=float(self.rng.integers(0, 2)),
        )


class Driver:
    """The driver's own work, and the seconds it took."""

    def __init__(self, shape: Shape) -> None:
        self.config = job_config(shape)
        self.objective = TokenObjective(method_for(self.config), self.config.objective)
        self.shape, self.engines = shape, ScriptedEngines(shape)
        self.filters = filters_of(self.config.rollout.filters)
        self.admission = Admission(shape.groups, self.config.schedule.staleness, self.config.schedule.over_issue)
        self.partial: dict[str, list[Trajectory]] = {}
        self.finished: dict[str, Group] = {}
        self.version = self.count = self.packed = 0
        self.seconds: dict[str, float] = dict.fromkeys(
            ("admission", "grouping", "filters", "advantages and packing"), 0.0
        )

    def step(self) -> int:
        """Do one step; return the number of trajectories that went through, filtered ones included."""
        done = 0
        while (batch := self._batch()) is None:
            self._ask()
            for trajectory in self.engines.answer():
                done += 1
                self._take_in(trajectory)
        groups = [self.finished.pop(name) for name in batch]
        began = time.perf_counter()
        updates, _ = prepare_updates(groups, self.objective, self.config, self.version, _nothing_frozen)
        self.seconds["advantages and packing"] += time.perf_counter() - began
        self.packed += sum(len(b.trajectory_index) for update in updates for rank in update for b in rank)
        self.version += 1
        self.admission.trained(self.version)
        return done

    def _batch(self) -> list[str] | None:
        began = time.perf_counter()
        batch = self.admission.batch(self.version)
        self.seconds["admission"] += time.perf_counter() - began
        return batch

    def _ask(self) -> None:
        began = time.perf_counter()
        names = [f"{self.version}-{self.count + i}" for i in range(self.admission.room(self.version))]
        self.count += len(names)
        for name in names:
            self.admission.submitted(name, self.version)
        self.seconds["admission"] += time.perf_counter() - began
        self.engines.ask(names, self.version)

    def _take_in(self, trajectory: Trajectory) -> None:
        began = time.perf_counter()
        members = self.partial.setdefault(trajectory.group_id, [])
        members.append(trajectory)
        if len(members) < self.shape.responses:
            self.seconds["grouping"] += time.perf_counter() - began
            return
        del self.partial[trajectory.group_id]
        group = Group(trajectory.group_id, trajectory.prompt, sorted(members, key=lambda t: t.sample))
        grouped = time.perf_counter()
        self.seconds["grouping"] += grouped - began
        (left_out_by,) = apply_filters(self.filters, [group])
        filtered = time.perf_counter()
        self.seconds["filters"] += filtered - grouped
        if left_out_by is None:
            self.finished[group.group_id] = group
            self.admission.finished(group.group_id)
        else:
            self.admission.cancelled(group.group_id)
        self.seconds["admission"] += time.perf_counter() - filtered


def _nothing_frozen(trajectories: list[Trajectory], names: Sequence[str]) -> dict[str, list[np.ndarray]]:
    raise AssertionError(f"GRPO with one update a step asks the trainer for nothing, but {names} were asked for")


def measure(shape: Shape, trajectories: int) -> None:
    """Push this many trajectories through, and print rate and memory."""
    driver, process = Driver(shape), psutil.Process()
    for _ in range(2):
        driver.step()  # imports and allocators warm up
    driver.seconds = dict.fromkeys(driver.seconds, 0.0)
    done = 0
    print(f"{'trajectories':>12} {'driver seconds':>15} {'per second':>11} {'RSS MiB':>8}")
    for point in range(1, MEMORY_POINTS + 1):
        while done < trajectories * point // MEMORY_POINTS:
            done += driver.step()
        seconds = sum(driver.seconds.values())
        print(
            f"{done:>12,} {seconds:>15.2f} {done / seconds:>11,.0f} {process.memory_info().rss / 2**20:>8.0f}",
            flush=True,
        )
    for name, seconds in driver.seconds.items():
        print(f"{name:>24}: {seconds / done * 1e6:6.1f} us per trajectory")
    rate = done / sum(driver.seconds.values())
    print(
        f"{rate:,.0f} trajectories/s; target {TARGET_PER_SECOND:,}: {'met' if rate >= TARGET_PER_SECOND else 'MISSED'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--groups", type=int, default=512, help="per step")
    parser.add_argument("--responses", type=int, default=8, help="per group")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--response-tokens", type=int, default=16, help="the longest")
    parser.add_argument("--quick", action="store_true", help="50,000 trajectories")
    parser.add_argument("--profile", action="store_true", help="print the functions that take most of ten steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = Shape(options.groups, options.responses, options.prompt_tokens, options.response_tokens)
    if not options.profile:
        measure(shape, 50_000 if options.quick else options.trajectories)
        return
    driver = Driver(shape)
    driver.step()
    with cProfile.Profile() as profile:
        for _ in range(10):
            driver.step()
    pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
