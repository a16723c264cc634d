"""Rules on settings that are passed through to DeepSpeed and vLLM: they may not repeat what a key of ours sets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from configs.blocks.training import Optimization
from configs.rules.problem import Problem

# Keys of pass-through blocks that a named key owns; setting both would let them disagree silently.
OWNED_BY_DEEPSPEED = {
    "train_batch_size": "it follows from rollout.prompts_per_step and rollout.responses_per_prompt",
    "train_micro_batch_size_per_gpu": "use train.max_tokens_per_micro_batch",
    "gradient_accumulation_steps": "it follows from train.max_tokens_per_micro_batch",
    "gradient_clipping": "use train.max_grad_norm",
    "optimizer": "use train.learning_rate, betas, eps and weight_decay",
    "scheduler": "use train.schedule and train.warmup_steps",
    "bf16.enabled": "use model.dtype",
    "fp16.enabled": "use model.dtype (float16 is not supported)",
    "zero_optimization.stage": "use train.zero_stage",
}
OWNED_BY_ENGINE = {
    "model": "use model.path",
    "tokenizer": "use model.path",
    "dtype": "use model.dtype",
    "trust_remote_code": "use model.trust_remote_code",
    "device": "use model.device",
    "tensor_parallel_size": "use the tensor_parallel_size beside it",
    "seed": "one seed for all requests gives all prompts the same noise; use rollout.seeded",
    "logprobs_mode": "the log-probabilities must be those of the sampled distribution",
    "worker_extension_cls": "weight sync uses it; see the sync block",
    "weight_transfer_config": "use the sync block",
    "enable_lora": "use the lora block",
    "enable_sleep_mode": "engines that share a GPU sleep; see placement.colocate",
    "max_lora_rank": "use lora.rank",
}


def _passed_through(key: str, block: dict[str, Any], owned: dict[str, str]) -> Iterator[Problem]:
    for path, way_out in owned.items():
        node: Any = block
        for name in path.split("."):
            node = node.get(name) if isinstance(node, dict) else None
        if node is not None:
            yield f"{key}.{path}", f"is set elsewhere: {way_out}"


def deepspeed_problems(train: Optimization) -> Iterator[Problem]:
    """Yield what train.deepspeed may not contain, because a key of ours sets it or because DeepSpeed would drop it."""
    yield from _passed_through("train.deepspeed", train.deepspeed, OWNED_BY_DEEPSPEED)
    yield from _auto_values("train.deepspeed", train.deepspeed)


def _auto_values(key: str, node: Any) -> Iterator[Problem]:
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _auto_values(f"{key}.{name}", value)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _auto_values(f"{key}.{index}", value)
    elif node == "auto":
        yield key, "'auto' is dropped silently by DeepSpeed here; write the number"


def engine_problems(key: str, engine: dict[str, Any]) -> Iterator[Problem]:
    """Yield what an `engine` block may not contain because a key of ours sets it, and shares outside of 0 to 1."""
    yield from _passed_through(key, engine, OWNED_BY_ENGINE)
    utilization = engine.get("gpu_memory_utilization")
    if utilization is not None and not (isinstance(utilization, int | float) and 0 < utilization <= 1):
        yield f"{key}.gpu_memory_utilization", f"must be a share above 0 and at most 1; given {utilization!r}"


def engine_length_problems(key: str, engine: dict[str, Any], longest: int, new_tokens_key: str) -> Iterator[Problem]:
    """Yield a complaint when the engine's max_model_len is below the longest possible sequence."""
    limit = engine.get("max_model_len")
    if isinstance(limit, int) and limit < longest:
        yield (
            f"{key}.max_model_len",
            f"{limit} cannot hold the longest sequence of {longest} tokens (data.max_prompt_tokens + "
            f"{new_tokens_key}); raise it or lower one of those",
        )
