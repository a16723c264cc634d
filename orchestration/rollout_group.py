"""The driver's one handle on all rollout engines."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from configs.schema import EvalConfig, RLConfig
from orchestration.devices import DeviceSpec
from orchestration.rollout_actor import RolloutActor, engine_arguments
from orchestration.run_directory import RunDirectory
from rollouts.records import Group, Prompt, Trajectory
from rollouts.sampling import Sampling
from rollouts.worker import Asking, Collected, Finished

SHARED_GPU_MEMORY = 0.35  # of a GPU that an engine shares with a trainer rank
COLLECT_SECONDS = 1.0  # that an engine waits for its first finished group before it answers without one


@dataclass(frozen=True)
class Rollouts:
    """The responses of one step from all engines."""

    groups: list[Group]
    generate_seconds: float
    reward_seconds: float

    @property
    def trajectories(self) -> list[Trajectory]:
        return [t for group in self.groups for t in group.trajectories]


@dataclass(frozen=True)
class Outstanding:
    """An asking whose group did not come back yet, with all it takes to ask it again."""

    asking: Asking
    sampling: Sampling
    step: int


class Engine:
    """One engine as the driver sees it."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.outstanding: dict[str, Outstanding] = {}  # by group id
        self.collecting: Any = None  # the one call of `collect` under way
        self.collected: Collected | None = None  # its last answer, for the counters

    @property
    def responses_under_way(self) -> int:
        return sum(one.asking.samples for one in self.outstanding.values())


class RolloutGroup:
    """All engines, driven together. A group stays whole on one engine."""

    def __init__(self, actors: list[Any]) -> None:
        self.engines = [Engine(actor) for actor in actors]

    @property
    def actors(self) -> list[Any]:
        return [engine.actor for engine in self.engines]

    @property
    def outstanding(self) -> list[Outstanding]:
        """All askings whose groups did not come back yet, engine by engine."""
        return [one for engine in self.engines for one in engine.outstanding.values()]

    @classmethod
    def create(
        cls, config: RLConfig | EvalConfig, device: DeviceSpec, run: RunDirectory, options: list[dict[str, Any]]
    ) -> tuple[RolloutGroup, list[Any]]:
        """Create one actor per entry of `options` (Ray actor options); returns the group and the start-up futures."""
        environment = config.rollout.environment if isinstance(config, RLConfig) else "single_turn"
        actors = []
        for i, placed in enumerate(options):
            engine = engine_arguments(config, device, seed=config.run.seed * len(options) + i)
            if placed.get("num_gpus") == 0.5:  # a trainer rank is on the same GPU; leave it room
                engine["engine"] = {"gpu_memory_utilization": SHARED_GPU_MEMORY, **engine["engine"]}
            actor = ray.remote(RolloutActor).options(**placed)
            log = str(run.log_path(f"engine_{i}"))
            actors.append(actor.remote(log, engine, config.model, config.reward, environment))
        return cls(actors), [actor.start.remote() for actor in actors]

    def ask(self, askings: list[Asking], sampling: Sampling, step: int) -> None:
        """Have the engines begin these askings; returns at once. Each goes to the engine with the fewest responses under way."""
        dealt: list[list[Asking]] = [[] for _ in self.engines]
        for asking in askings:
            least = min(range(len(self.engines)), key=lambda i: self.engines[i].responses_under_way)
            self.engines[least].outstanding[asking.group_id] = Outstanding(asking, sampling, step)
            dealt[least].append(asking)
        for engine, part in zip(self.engines, dealt, strict=True):
            if part:
                engine.actor.ask.remote(part, sampling, step)

    def collect(self, wait_seconds: float) -> list[Group]:
        """Groups that finished since the last call, in order of engines; waits at most this long for the first one."""
        deadline = time.monotonic() + wait_seconds
        while True:
            groups = self._collect_once(max(0.0, deadline - time.monotonic()))
            if groups or time.monotonic() >= deadline:
                return groups

    def _collect_once(self, wait_seconds: float) -> list[Group]:
        waiting = [engine for engine in self.engines if engine.outstanding]
        if not waiting:
            return []
        for engine in waiting:
            if engine.collecting is None:
                engine.collecting = engine.actor.collect.remote(COLLECT_SECONDS)
        ray.wait([engine.collecting for engine in waiting], timeout=wait_seconds)
        groups: list[Group] = []
        for engine in waiting:
            if ray.wait([engine.collecting], timeout=0)[0]:
                engine.collected, engine.collecting = ray.get(engine.collecting), None
                assert engine.collected is not None
                for group in engine.collected.groups:
                    del engine.outstanding[group.group_id]
                    groups.append(group)
        return groups

    def generate(
        self, prompts: list[Prompt], samples: int, sampling: Sampling, step: int, label: str,
        earlier: Sequence[Prompt] = (),
    ) -> Rollouts:  # fmt: skip
        """Ask every prompt `samples` times; groups come back in the order of `prompts`.

        earlier: prompts already asked in this step. Group ids go on from there, and a prompt that is asked again, also
        within `prompts`, gets samples of other seeds.
        """
        askings = step_askings(prompts, samples, f"{label}-{step}", earlier)
        dealt = [askings[i :: len(self.actors)] for i in range(len(self.actors))]
        calls = [a.generate.remote(part, sampling, step) for a, part in zip(self.actors, dealt, strict=True)]
        finished: list[Finished] = ray.get(calls)
        by_id = {group.group_id: group for part in finished for group in part.groups}
        generate_seconds = max(part.generate_seconds for part in finished)
        whole = max(part.generate_seconds + part.reward_seconds for part in finished)
        return Rollouts([by_id[asking.group_id] for asking in askings], generate_seconds, whole - generate_seconds)

    def load_weights(self, version: int, update: dict[str, Any]) -> None:
        ray.get([actor.load_weights.remote(version, update) for actor in self.actors])

    def probe(self, prompts: list[Prompt], sampling: Sampling, step: int) -> list[Trajectory]:
        """Short continuations from every engine."""
        return [t for part in ray.get([a.probe.remote(prompts, sampling, step) for a in self.actors]) for t in part]

    def close(self) -> None:
        ray.get([actor.close.remote() for actor in self.actors])

    def abandon(self) -> None:
        """End the actors at once; their engines and scoring processes end with them."""
        for actor in self.actors:
            ray.kill(actor)


def step_askings(prompts: list[Prompt], samples: int, label: str, earlier: Sequence[Prompt]) -> list[Asking]:
    """One asking per prompt, each with an id and seeds that no other asking of the step has."""
    times = Counter(prompt.prompt_id for prompt in earlier)
    askings = []
    for number, prompt in enumerate(prompts, start=len(earlier)):
        askings.append(Asking(f"{label}-{number}", prompt, samples, samples * times[prompt.prompt_id]))
        times[prompt.prompt_id] += 1
    return askings
