"""The optimizer of a trainer rank: parameter groups, whole parameters under ZeRO-3, one DeepSpeed step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param
from torch import Tensor

from configs.blocks.rl import Model
from configs.blocks.training import Optimization
from orchestration.trainer.settings import TrainerSettings


def engine_around(model: torch.nn.Module, settings: TrainerSettings) -> Any:
    """Return DeepSpeed's engine around a float32 model. In bfloat16 the optimizer's own weights are the model's, not
    rounded, and its moments begin with the first update."""
    train = settings.train
    optimizer = torch.optim.AdamW(
        parameter_groups(model, train), lr=train.learning_rate, betas=train.betas, eps=train.eps, fused=True
    )
    # DeepSpeed makes the optimizer's weights of rounded ones. What rounding takes away is kept until then.
    kept: dict[Any, Tensor] = {
        parameter: parameter.data
        for parameter in model.parameters()
        if settings.model.dtype == "bfloat16" and parameter.requires_grad
        if not torch.equal(parameter.data.bfloat16().float(), parameter.data)
    }
    config = deepspeed_config(settings.model, train, torch.distributed.get_world_size())
    ds_engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    if isinstance(ds_engine.optimizer, FP16_UnfusedOptimizer):  # ZeRO 0, which begins with a step without gradients
        low = itertools.chain.from_iterable(ds_engine.optimizer.fp16_groups)
        for parameter, own in zip(low, itertools.chain.from_iterable(ds_engine.optimizer.fp32_groups), strict=True):
            own.data.copy_(kept.get(parameter, parameter.data))
        ds_engine.optimizer.optimizer.state.clear()
        return ds_engine
    for parameter, data in kept.items():
        if train.zero_stage == 3:
            size = parameter.ds_tensor.numel()
            padded = torch.nn.functional.pad(
                data.flatten(), (0, size * torch.distributed.get_world_size() - data.numel())
            )
            safe_set_local_fp32_param(parameter, padded.narrow(0, size * torch.distributed.get_rank(), size))
        else:
            safe_set_full_fp32_param(parameter, data)
    return ds_engine


def optimizer_step(ds_engine: Any, settings: TrainerSettings) -> tuple[float, bool]:
    """Take DeepSpeed's optimizer step. Return the global gradient norm, and whether the step was taken: it is not when
    the norm is Inf or NaN."""
    if settings.train.zero_stage == 0 and settings.model.dtype == "float32":
        # A plain optimizer: DeepSpeed neither tells its norm nor refuses a bad one. Gradients are the same on every
        # rank.
        norm = float(
            torch.nn.utils.get_total_norm([p.grad for p in ds_engine.module.parameters() if p.grad is not None])
        )
        if not math.isfinite(norm):
            ds_engine.set_gradient_accumulation_boundary(False)
            ds_engine.step()  # counts the micro-batch, takes no step
            ds_engine.zero_grad()
            return norm, False
        ds_engine.step()
        return norm, True
    ds_engine.step()
    return float(ds_engine.get_global_grad_norm()), ds_engine.was_step_applied()


def full_parameters(module: torch.nn.Module, train: Optimization) -> Iterator[tuple[str, Tensor]]:
    """Yield whole parameters by name, gathered one at a time under ZeRO-3. A collective: every rank iterates."""
    for name, parameter in module.named_parameters():
        with whole([parameter], train):
            yield name, parameter.detach()


def whole(parameters: list[torch.nn.Parameter], train: Optimization) -> AbstractContextManager[Any]:
    """Return a context inside which parameters that ZeRO-3 has partitioned are whole."""
    return deepspeed.zero.GatheredParameters(parameters, enabled=train.zero_stage == 3)


def parameter_groups(policy: torch.nn.Module, train: Optimization) -> list[dict[str, Any]]:
    """Return AdamW's groups: matrices are decayed, norms and biases are not; without decay there is one group."""
    parameters = [p for p in policy.parameters() if p.requires_grad]
    if train.weight_decay == 0:
        return [{"params": parameters, "weight_decay": 0.0}]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def summed_over_ranks(sums: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return sums by name over all ranks, float32 scalars; a rank may lack names when it has no data."""
    names: list[list[str]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(names, sorted(sums))
    every = sorted({name for own in names for name in own})
    zero = torch.zeros((), dtype=torch.float64, device=device)
    together = torch.stack([sums.get(name, zero) for name in every])
    torch.distributed.all_reduce(together)
    return dict(zip(every, together.float(), strict=True))


def learning_rate_at(update: int, train: Optimization, total_updates: int) -> float:
    """Return the learning rate of update number `update` (from 0). No update has a rate of zero: warm-up starts above
    it, and the last update is still above the minimum to which cosine and linear lead."""
    if update < train.warmup_steps:
        return train.learning_rate * (update + 1) / train.warmup_steps
    span = max(total_updates - train.warmup_steps, 1)
    progress = min((update - train.warmup_steps) / span, 1.0)
    decay = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}[
        train.schedule
    ]
    return train.min_learning_rate + (train.learning_rate - train.min_learning_rate) * decay


def deepspeed_config(model: Model, train: Optimization, ranks: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration with numbers only; it drops "auto" without Hugging Face's integration."""
    config: dict[str, Any] = {
        "train_batch_size": ranks,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # set by hand: updates have as many micro-batches as they need
        "gradient_clipping": train.max_grad_norm,
        "zero_optimization": {
            "stage": train.zero_stage,
            "reduce_bucket_size": 50_000_000,
            "allgather_bucket_size": 50_000_000,
            "stage3_prefetch_bucket_size": 50_000_000,
            "stage3_param_persistence_threshold": 100_000,
        },
        # Without the check a bfloat16 run under ZeRO 1 and 2 would step on NaN.
        "bf16": {"enabled": model.dtype == "bfloat16", "check_grad_overflow": True},
        "zero_allow_untested_optimizer": True,  # torch's fused AdamW; tested here at every stage
        "steps_per_print": 10**9,
    }
    if model.dtype == "bfloat16" and train.zero_stage > 0:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    for key, value in train.deepspeed.items():
        config[key] = {**config[key], **value} if isinstance(config.get(key), dict) else value
    return config
