"""The shape of a job of any kind: its engines and its trainer ranks.

It is made once from the configuration, so that whatever starts, places or estimates a job need not know the
configuration's kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from configs.blocks.evaluation import EvalConfig
from configs.blocks.placement import Placement
from configs.blocks.rl import Model, Reward, RLConfig
from configs.blocks.schedule import Failures
from configs.blocks.sync import SyncMethod


@dataclass(frozen=True)
class EngineJob:
    """The engines of a job: how many, the model they serve, their limits, and how many losses are allowed."""

    model: Model
    reward: Reward
    seed: int
    engines: int
    tensor_parallel_size: int  # devices per engine
    arguments: dict[str, Any]  # passed to vLLM unchanged
    max_prompt_tokens: int
    max_new_tokens: int
    tokens_at_once: int  # tokens of all prompts and responses that are generated together, over all engines
    failures: Failures
    placement: Placement  # how an engine shares a GPU with a trainer rank
    key_prefix: str = ""  # in messages, it stands before the keys engines, tensor_parallel_size and engine
    max_new_tokens_key: str = "eval.max_new_tokens"
    environment: str = "single_turn"
    in_flight: str = "recompute"
    pauses_while_training: bool = False
    lora_rank: int | None = None  # rank of the adapters that the engines take; None when they take whole models

    @property
    def processes(self) -> int:
        """Return the number of devices of all engines. On a CPU each device is a process."""
        return self.engines * self.tensor_parallel_size

    @property
    def max_model_len(self) -> int:
        """Return the number of tokens in the longest possible sequence."""
        return self.max_prompt_tokens + self.max_new_tokens

    @classmethod
    def of_rl(cls, config: RLConfig) -> EngineJob:
        """Return the engines of a reinforcement learning job."""
        rollout, schedule = config.rollout, config.schedule
        takes_adapter = config.lora is not None and config.lora.sync == "adapter"
        sequences = rollout.prompts_per_step * rollout.responses_per_prompt
        return cls(
            model=config.model.located(),
            reward=config.reward,
            seed=config.run.seed,
            engines=rollout.engines,
            tensor_parallel_size=rollout.tensor_parallel_size,
            arguments=rollout.engine,
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_new_tokens=max(rollout.max_new_tokens, config.eval.max_new_tokens or 0),
            tokens_at_once=sequences * (config.data.max_prompt_tokens + rollout.max_new_tokens),
            failures=config.failures,
            key_prefix="rollout.",
            max_new_tokens_key="rollout.max_new_tokens",
            environment=rollout.environment,
            in_flight=schedule.in_flight,
            pauses_while_training=schedule.mode == "overlap" and schedule.pause_while_training,
            lora_rank=config.lora.rank if config.lora is not None and takes_adapter else None,
            placement=config.placement,
        )

    @classmethod
    def of_eval(cls, config: EvalConfig) -> EngineJob:
        """Return the engines of an evaluation. A lost one is not replaced, since an evaluation can be run again."""
        sequences = config.eval.max_prompts * config.eval.samples_per_prompt
        return cls(
            model=config.model.located(),
            reward=config.reward,
            seed=config.run.seed,
            engines=config.engines,
            tensor_parallel_size=config.tensor_parallel_size,
            arguments=config.engine,
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_new_tokens=config.eval.max_new_tokens,
            tokens_at_once=sequences * (config.data.max_prompt_tokens + config.eval.max_new_tokens),
            failures=Failures(engine_restarts=0),
            placement=Placement(),
        )


@dataclass(frozen=True)
class TrainerJob:
    """The trainer ranks of a job that also has engines, and how both share the devices."""

    ranks: int
    threads_per_rank: int  # 0 means the trainer's cores divided by ranks
    placement: Placement
    colocate: bool | None  # None means when devices are few; False when both sides work at the same time
    sync_method: SyncMethod

    @classmethod
    def of_rl(cls, config: RLConfig) -> TrainerJob:
        """Return the trainer of a reinforcement learning job."""
        return cls(
            ranks=config.train.ranks,
            threads_per_rank=config.train.threads_per_rank,
            placement=config.placement,
            colocate=config.colocate,
            sync_method=config.sync.method,
        )
