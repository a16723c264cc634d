"""The rollout workers as Ray actors, and what their engines are made with."""

from __future__ import annotations

from typing import Any

from configs.schema import EvalConfig, Model, Reward, RLConfig, Rollout
from orchestration.devices import DeviceSpec
from orchestration.logs import redirect_output_to
from rollouts.engine import VLLMEngine
from rollouts.worker import RolloutWorker


class RolloutActor(RolloutWorker):
    """A rollout worker in a process of its own, its output in a log file of the run."""

    def __init__(
        self, log_file: str, engine: dict[str, Any], tokenizer: Model, reward: Reward, environment: str
    ) -> None:
        redirect_output_to(log_file)
        super().__init__(VLLMEngine(**engine), tokenizer, reward, environment)


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
