"""The shape of a job, whatever its kind: its engines and its trainer ranks. Made once from the configuration, so that
nobody who starts, places or estimates a job asks of which kind the configuration is."""

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
    """The engines of a job, what they serve, and what is done when one is lost."""

    model: Model
    reward: Reward
    seed: int
    engines: int
    tensor_parallel_size: int  # devices of an engine
    arguments: dict[str, Any]  # passed to vLLM as they are
    max_prompt_tokens: int
    max_new_tokens: int
    tokens_at_once: int  # prompts and responses of everything that is generated together, over all engines
    failures: Failures
    placement: Placement  # how an engine shares a GPU with a trainer rank
    key_prefix: str = ""  # of engines, tensor_parallel_size and engine, for messages
    max_new_tokens_key: str = "eval.max_new_tokens"
    environment: str = "single_turn"
    in_flight: str = "recompute"
    pauses_while_training: bool = False
    lora_rank: int | None = None  # of the adapter that the engines take; None: they take whole models

    @property
    def processes(self) -> int:
        """Devices of all engines; on a CPU each is a process."""
        return self.engines * self.tensor_parallel_size

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""
        return self.max_prompt_tokens + self.max_new_tokens

    @classmethod
    def of_rl(cls, config: RLConfig) -> EngineJob:
        """Return the engines of a reinforcement learning job."""
        rollout, schedule = config.rollout, config.schedule
        takes_adapter = config.lora is not None and config.lora.sync == "adapter"
        sequences = rollout.prompts_per_step * rollout.responses_per_prompt
        return cls(
            model=config.model,
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
        """Return the engines of an evaluation. None is replaced: the evaluation is simply run again."""
        sequences = config.eval.max_prompts * config.eval.samples_per_prompt
        return cls(
            model=config.model,
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
    """The trainer ranks of a job that has engines too, and how both share the devices."""

    ranks: int
    threads_per_rank: int  # 0: the trainer's cores divided by ranks
    placement: Placement
    colocate: bool | None  # None: when devices are few; False where both sides work at the same time
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
