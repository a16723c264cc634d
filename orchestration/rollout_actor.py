"""The rollout workers as Ray actors, and the driver's one handle on all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from configs.schema import EvalConfig, Model, Reward, RLConfig, Rollout
from orchestration.devices import DeviceSpec
from orchestration.logs import redirect_output_to
from orchestration.metrics import Tally
from orchestration.run_directory import RunDirectory
from rollouts.engine import VLLMEngine
from rollouts.records import Group, Prompt, Trajectory, paid_alike
from rollouts.sampling import Sampling
from rollouts.worker import Asking, Finished, RolloutWorker

SHARED_GPU_MEMORY = 0.35  # of a GPU that an engine shares with a trainer rank


class RolloutActor(RolloutWorker):
    """A rollout worker in a process of its own, its output in a log file of the run."""

    def __init__(
        self, log_file: str, engine: dict[str, Any], tokenizer: Model, reward: Reward, environment: str
    ) -> None:
        redirect_output_to(log_file)
        super().__init__(VLLMEngine(**engine), tokenizer, reward, environment)


@dataclass(frozen=True)
class Rollouts:
    """The responses of one step from all engines."""

    groups: list[Group]
    generate_seconds: float
    reward_seconds: float

    @property
    def trajectories(self) -> list[Trajectory]:
        return [t for group in self.groups for t in group.trajectories]


class RewardFailures(RuntimeError):
    """Too many responses of a step could not be scored."""


class RolloutGroup:
    """All engines, driven together. Groups are dealt to engines in turn; a group stays whole on one engine."""

    def __init__(self, actors: list[Any]) -> None:
        self.actors = actors

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


def engine_arguments(config: RLConfig | EvalConfig, device: DeviceSpec, seed: int) -> dict[str, Any]:
    """What VLLMEngine is constructed with, in either kind of job."""
    block: Rollout | EvalConfig
    lora_rank = None
    if isinstance(config, RLConfig):
        if config.lora is not None and config.lora.sync == "adapter":
            lora_rank = config.lora.rank
        block, sync_method = config.rollout, config.sync.method
        new_tokens = max(config.rollout.max_new_tokens, config.eval.max_new_tokens or 0)
    else:
        block, sync_method, new_tokens = config, "disk", config.eval.max_new_tokens
    return {
        "model_path": config.model.path,
        "dtype": config.model.dtype,
        "device": device.device,
        "tensor_parallel_size": block.tensor_parallel_size,
        "max_model_len": config.data.max_prompt_tokens + new_tokens,
        "sync_method": sync_method,
        "seed": seed,
        "threads": max(1, device.cores // block.engines),
        "trust_remote_code": config.model.trust_remote_code,
        "lora_rank": lora_rank,
        "engine": block.engine,
    }


def rollout_tally(groups: list[Group], pass_threshold: float) -> Tally:
    """What a step's responses were like: rewards over scored ones, lengths over all."""
    tally = Tally()
    trajectories = [t for group in groups for t in group.trajectories]
    scored = [t for t in trajectories if t.reward is not None]
    rewards = np.array([t.reward for t in scored], dtype=np.float64)
    tally.add_values("reward/mean", rewards)
    tally.add_values("reward/pass_rate", rewards >= pass_threshold)
    for trajectory in scored:
        for part, value in trajectory.reward_parts.items():
            tally.add(f"reward/{part}", value)
    errors = sum(t.reward_error is not None for t in trajectories)
    tally.total("reward/errors", errors)
    tally.add("reward/error_rate", errors, len(trajectories))
    tally.add_values("rollout/response_tokens", [t.action_tokens for t in trajectories])
    tally.maximum("rollout/response_tokens_max", max(t.action_tokens for t in trajectories))
    tally.add_values("rollout/prompt_tokens", [len(t.prompt_ids) for t in trajectories])
    tally.add_values("rollout/truncated_share", [t.truncated for t in trajectories])
    tally.add_values("rollout/aborted_share", [t.finish_reason == "abort" for t in trajectories])
    tally.total("rollout/responses", len(trajectories))
    tally.total("rollout/tokens", sum(t.action_tokens for t in trajectories))
    logprobs = np.concatenate([t.behavior_logprobs[t.is_action] for t in trajectories])
    tally.add_values("rollout/entropy_nats", -logprobs)
    flat = sum(bool(g.scored) and paid_alike(g.scored) for g in groups)
    tally.total("rollout/zero_variance_groups", flat)
    tally.add("rollout/zero_variance_share", flat, len(groups))
    return tally


def refuse_failed_rewards(trajectories: list[Trajectory], reward: Reward) -> None:
    """Raises: RewardFailures, with the first error, when a larger share failed than reward.max_error_rate."""
    failed = [t for t in trajectories if t.reward_error is not None]
    if len(failed) > reward.max_error_rate * len(trajectories):
        raise RewardFailures(
            f"{len(failed)} of {len(trajectories)} responses could not be scored, more than reward.max_error_rate = "
            f"{reward.max_error_rate:g} allows. The first error (prompt {failed[0].prompt.prompt_id}, response "
            f"{failed[0].response!r}):\n{failed[0].reward_error}"
        )
