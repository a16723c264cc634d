"""Estimate from sizes alone how much memory a job will take, for planning: allocators and libraries add more."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from configs.blocks.rl import RLConfig
from configs.blocks.supervised import SLConfig
from configs.reading.load import method_for
from orchestration.cluster.job_shape import EngineJob
from orchestration.model.checkpoint_facts import ModelFacts
from orchestration.run.checksums import STATES_KEPT

if TYPE_CHECKING:
    from orchestration.model.lora import AdapterSize

GIB = 1024**3
BYTES = {"float32": 4, "bfloat16": 2}
CPU_KV_CACHE_BYTES = GIB  # what a CPU engine reserves unless rollout.engine.kv_cache_memory_bytes says otherwise


@dataclass(frozen=True)
class SecondModels:
    """The models that a trainer rank holds beside the policy."""

    reference: bool = False  # frozen
    critic: bool = False  # trained, with an optimizer of its own
    adapter: AdapterSize | None = None  # with it the policy's own weights are frozen


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by purpose; `trainer` is per rank, `engine` per engine."""

    trainer: dict[str, int]
    engine: dict[str, int]
    sync: int  # one version of the weights, in shared memory (direct) or on disk
    checkpoints: int  # on disk, at most
    saved_by_adapter: int = 0  # that a trainer rank would need on top to train every weight

    @property
    def trainer_total(self) -> int:
        return sum(self.trainer.values())

    @property
    def engine_total(self) -> int:
        return sum(self.engine.values())


def memory_of_rl(config: RLConfig, model: ModelFacts, adapter: AdapterSize | None, device: str) -> MemoryEstimate:
    """Return the memory of a reinforcement learning job on `device` ("cpu" or "cuda"). adapter: of a job with lora."""
    needs = method_for(config).needs()
    reference = "ref_logprobs" in needs or config.objective.kl.coef > 0
    critic = "values" in needs and config.critic.kind == "separate"
    return estimate(config, model, SecondModels(reference, critic, adapter), device)


def memory_of_engine(job: EngineJob, model: ModelFacts, device: str) -> dict[str, int]:
    """Return the memory of an engine on `device`: weights and key-value cache. A CPU engine reserves a fixed cache. A
    GPU engine takes a share of its device; counted here is the part that the sequences generated together can fill."""
    width = BYTES[job.model.dtype]
    reserved = job.arguments.get("kv_cache_memory_bytes")
    if isinstance(reserved, int):
        cache = reserved
    elif device == "cpu":
        cache = CPU_KV_CACHE_BYTES
    else:
        cache = job.tokens_at_once // job.engines * model.kv_values_per_token * width
    return {"weights": model.parameters * width, "key-value cache": cache}


def estimate(config: RLConfig, model: ModelFacts, has: SecondModels, device: str) -> MemoryEstimate:
    """Return the memory of a job whose trainer ranks hold these models beside the policy."""
    width, checkpoint = BYTES[config.model.dtype], config.checkpoint
    weights = model.parameters * width
    kept = _kept(config)
    trainer = _trainer(config, model, width, has)
    engine = memory_of_engine(EngineJob.of_rl(config), model, device)
    states = min(STATES_KEPT + 1, kept) * _resume_state(config, model, has, width)  # with the one being written
    if config.lora is None or has.adapter is None:
        return MemoryEstimate(trainer, engine, sync=weights, checkpoints=kept * weights + states)
    small, is_merged = has.adapter.parameters * width, config.lora.sync == "merged"
    every_weight = _trainer(config, model, width, replace(has, adapter=None))
    return MemoryEstimate(
        trainer,
        engine if is_merged else {**engine, "adapter": small},
        sync=weights if is_merged else small,
        checkpoints=kept * (small + weights * checkpoint.merged) + states,
        saved_by_adapter=sum(every_weight.values()) - sum(trainer.values()),
    )


def _trainer(config: RLConfig, model: ModelFacts, width: int, has: SecondModels) -> dict[str, int]:
    """Return the bytes per rank. For a policy with adapters, the reference is that policy without them."""
    adapter = has.adapter.parameters if has.adapter is not None else None
    parts = _model_state(config, model.parameters, adapter, width)
    if has.reference and adapter is None:
        parts["reference model"] = model.parameters * width
    if has.critic:
        parts["critic, with its optimizer"] = sum(_model_state(config, model.parameters, None, width).values())
    parts["activations, rough"] = _activations(config, model, width)
    return parts


def _model_state(config: RLConfig, parameters: int, adapter: int | None, width: int) -> dict[str, int]:
    """Return the bytes per rank. ZeRO 1 shards the optimizer's state, 2 also the gradients, 3 also the weights."""
    train = config.train
    shards = {stage: train.ranks if train.zero_stage >= stage else 1 for stage in (1, 2, 3)}
    trained = parameters if adapter is None else adapter
    parts = {"weights": (parameters + (adapter or 0)) * width // shards[3]}
    if width != 4:
        parts["float32 master weights"] = 4 * trained // shards[1]
    parts["Adam moments"] = 8 * trained // shards[1]
    parts["gradients"] = 4 * trained // shards[2]
    return parts


def disk_of_sl(config: SLConfig, model: ModelFacts, adapter: AdapterSize | None) -> int:
    """Return the bytes of disk that the checkpoints of a supervised job take at least."""
    width, kept = BYTES[config.model.dtype], _kept(config)
    parameters = model.parameters
    if config.lora is not None and adapter is not None:
        parameters = adapter.parameters + config.checkpoint.merged * model.parameters
    state = _resume_state(config, model, SecondModels(False, False, adapter), width)
    return kept * parameters * width + min(STATES_KEPT + 1, kept) * state


def _kept(config: RLConfig | SLConfig) -> int:
    """Return how many checkpoints lie on the disk at once, at least: one more than are kept while it is written."""
    steps = config.train.steps or 0  # of a supervised job that counts epochs they are not known yet
    every = config.checkpoint.period(steps)
    return min(config.checkpoint.keep + 1, 1 + steps // every) if every else 1


def _resume_state(config: RLConfig | SLConfig, model: ModelFacts, has: SecondModels, width: int) -> int:
    """Return the bytes on disk, of all ranks: trained weights, float32 masters of other types, Adam moments."""
    if not config.checkpoint.resume_state:
        return 0
    trained = has.adapter.parameters if has.adapter is not None else model.parameters
    trained += model.parameters if has.critic else 0
    return trained * (width + (4 if width != 4 else 0) + 8)


def _activations(config: RLConfig, model: ModelFacts, width: int) -> int:
    """Return the bytes of a full micro-batch: a layer keeps about 12 vectors of the hidden and 4 of the intermediate
    size per token; with gradient checkpointing every layer keeps its input, and one layer the rest."""
    per_layer = (12 * model.hidden + 4 * model.intermediate) * width
    per_token = model.layers * per_layer
    if config.model.gradient_checkpointing:
        per_token = model.layers * model.hidden * width + per_layer
    return config.train.max_tokens_per_micro_batch * per_token


def machine_memory() -> int:
    """Return the bytes of main memory that this process may use: the machine's, or its container's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


def shown(size: int) -> str:
    """Return a number of bytes as text for people."""
    if size >= 0.1 * GIB:
        return f"{size / GIB:.2f} GiB"
    return f"{size / 1024**2:.1f} MiB" if size >= 2**20 else f"{size / 1024:.1f} KiB"
