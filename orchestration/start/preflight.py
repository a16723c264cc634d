"""Checks of files and machine before anything heavy starts: each mistake costs seconds, not the start of the engines.

All checks run, so that one message lists all that is wrong. Nothing is written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from configs.blocks.lora import Lora
from configs.blocks.objective import Filter
from configs.blocks.rl import EvalConfig, Model, RLConfig
from configs.reading.load import ConfigError, method_for, run_directory
from configs.rules.rl import warnings_for
from orchestration.cluster.job_shape import EngineJob, TrainerJob
from orchestration.metrics.definitions import METRICS
from orchestration.model.checkpoint_facts import ModelFacts, model_facts
from orchestration.start.memory_estimate import MemoryEstimate, SecondModels, estimate, machine_memory, shown
from rollouts.admission import Admission

if TYPE_CHECKING:
    from data_feeds.prompts.prompts import PromptSets
    from orchestration.cluster.devices import DeviceSpec
    from orchestration.model.lora import AdapterSize

T = TypeVar("T")
SHARED_MEMORY = Path("/dev/shm")
NEEDS_SEVERAL = ("zero_variance", "pass_rate")  # filters that leave out every group of one response
# Head dimensions that vLLM's CPU attention knows; a test compares them with the installed vLLM.
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


@dataclass(frozen=True)
class Checked:
    """What the checks found out on the way, for the plan and the run."""

    device: DeviceSpec
    model: ModelFacts
    prompts: PromptSets
    memory: MemoryEstimate
    warnings: list[str]
    adapter: AdapterSize | None = None  # of a job with lora


def preflight(config: RLConfig | EvalConfig, is_resumed: bool = False) -> Checked:
    """Check files and machine for a job; one that is resumed finds its run directory full.

    Raises:
        ConfigError: with every problem found, each naming its key or file and the way out.
    """
    from orchestration.run import directory as on_disk

    problems: list[str] = []

    def attempt(check: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return check(*arguments)
        except ValueError as error:
            problems.append(str(error))
            return None

    if not is_resumed:
        attempt(on_disk.check_free, run_directory(config))
    attempt(check_writable, run_directory(config))
    model = attempt(model_facts, config.model)
    device = attempt(check_devices, config)
    for index, part in enumerate(config.reward.parts):
        attempt(check_reward, index, part.function, part.params)
    if isinstance(config, RLConfig):
        for index, block in enumerate(config.rollout.filters):
            attempt(check_filter, index, block, config.rollout.responses_per_prompt)
    attempt(check_rollouts, config)
    prompts = memory = adapter = None
    if model is not None:
        attempt(check_model_fits, config, model)
        attempt(check_head_dim, model, device)
        prompts = attempt(load_data, config)
        adapter = attempt(check_adapter, config.lora, config.model) if isinstance(config, RLConfig) else None
        has = second_models(config, adapter)
        memory = estimate(config, model, has, device.device if device else "cpu")
        attempt(check_shared_memory, config, memory)
        attempt(check_disk, config, memory)
    if problems:
        raise ConfigError(problems[0] if len(problems) == 1 else "\n  ".join([f"{len(problems)} problems", *problems]))
    assert device is not None and model is not None and prompts is not None and memory is not None
    warnings = [*warnings_for(config), *warnings_about(config, device, prompts, memory)]
    return Checked(device, model, prompts, memory, warnings, adapter)


def check_writable(run: Path) -> None:
    """Raises ValueError unless the run directory could be made."""
    parent = existing_parent(run)
    if not parent.is_dir():
        raise ValueError(f"run.dir: {parent} is a file, so {run} cannot be made; choose another with --run-dir")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"run.dir: {parent} is not writable, so {run} cannot be made; choose another with --run-dir")


def existing_parent(path: Path) -> Path:
    """The path itself, or the nearest folder above that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def check_devices(config: RLConfig | EvalConfig) -> DeviceSpec:
    """The device to run on. Raises ValueError when the job wants more of them than there are.

    On a Ray cluster (RAY_ADDRESS) the other machines' devices are not known here: placement decides there.
    """
    from orchestration.cluster.cpu_cores import core_plan
    from orchestration.cluster.devices import resolve, shares_gpus

    device = resolve(config.model.device)
    engine_job = EngineJob.of_rl(config) if isinstance(config, RLConfig) else EngineJob.of_eval(config)
    trainer_job = TrainerJob.of_rl(config) if isinstance(config, RLConfig) else None
    core_plan(engine_job, trainer_job, device)  # raises
    ranks, in_turn = (trainer_job.ranks, trainer_job.colocate) if trainer_job is not None else (0, None)
    prefix, for_engines = engine_job.key_prefix, engine_job.processes
    if "RAY_ADDRESS" in os.environ:
        return device
    engines = f"{prefix}engines x {prefix}tensor_parallel_size = {for_engines}"
    if device.device == "cuda":
        try:
            shared = shares_gpus(ranks, engine_job.engines, engine_job.tensor_parallel_size, device.gpus, in_turn)
        except ValueError as error:
            raise ValueError(f"{error}. Lower them, set RAY_ADDRESS to a cluster, or model.device: cpu") from error
        if shared and trainer_job is not None and trainer_job.sync_method == "nccl":
            raise ValueError(
                "sync.method: nccl joins no two processes on one GPU, and here rank and engine share; use direct"
            )
        return device
    too_many = []
    if ranks > device.cores:
        too_many.append(f"train.ranks: {ranks} ranks")
    if for_engines > device.cores:
        too_many.append(f"{engines} engine processes")
    if too_many:
        raise ValueError(
            f"{' and '.join(too_many)} on {device.cores} CPU cores: each needs a core of its own; lower it to at most "
            f"{device.cores}, or set RAY_ADDRESS to a cluster that has more"
        )
    return device


def check_reward(index: int, name: str, params: dict[str, Any]) -> None:
    """Raises ValueError unless the reward imports and takes the given parameters."""
    from plugins.lookup import check_params, find_reward, labels

    (label,) = labels([name])
    try:
        check_params(find_reward(name), f"reward '{name}'", params)
        if f"reward/{label}" in METRICS:
            raise ValueError(f"it would be logged as reward/{label}, which is another metric; rename the function")
    except ValueError as error:
        raise ValueError(f"reward.parts.{index}: {error}") from error


def check_filter(index: int, block: Filter, responses_per_prompt: int) -> None:
    """Raises ValueError unless the filter imports and takes the given parameters, and could keep a group."""
    from plugins.lookup import check_params
    from rollouts.filter import find_filter

    what = f"filter '{block.function}'"
    try:
        function = find_filter(block.function)
        check_params(function, what, block.params)
        if responses_per_prompt == 1 and block.function in NEEDS_SEVERAL:
            raise ValueError(
                f"{what}: rollout.responses_per_prompt is 1, and one response never differs from itself, so every group "
                "would be left out; ask at least 2, or leave the filter out"
            )
    except ValueError as error:
        raise ValueError(f"rollout.filters.{index}: {error}") from error


def check_rollouts(config: RLConfig | EvalConfig) -> None:
    """Raises ValueError when the environment does not import or vLLM does not know an engine argument."""
    from rollouts.environment import find_environment

    block = config.rollout if isinstance(config, RLConfig) else config
    if isinstance(config, RLConfig):
        find_environment(config.rollout.environment)
    if block.engine:
        from rollouts.vllm.settings import check_arguments  # imports vLLM: seconds

        check_arguments(block.engine)


def check_model_fits(config: RLConfig | EvalConfig, model: ModelFacts) -> None:
    """Raises ValueError when sequences are longer than the model's positions, or its heads do not split."""
    if isinstance(config, RLConfig):
        new, key = max(config.rollout.max_new_tokens, config.eval.max_new_tokens or 0), "rollout.max_new_tokens"
        parallel, parallel_key = config.rollout.tensor_parallel_size, "rollout.tensor_parallel_size"
    else:
        new, key = config.eval.max_new_tokens, "eval.max_new_tokens"
        parallel, parallel_key = config.tensor_parallel_size, "tensor_parallel_size"
    longest = config.data.max_prompt_tokens + new
    if model.max_positions is not None and longest > model.max_positions:
        raise ValueError(
            f"data.max_prompt_tokens + {key} = {longest} tokens, but {model.path} has {model.max_positions} positions; "
            "lower one of them"
        )
    if model.heads % parallel:
        allowed = [n for n in range(1, model.heads + 1) if model.heads % n == 0]
        raise ValueError(
            f"{parallel_key}: {model.heads} attention heads of {model.path} do not split over {parallel} devices; use "
            f"one of {', '.join(map(str, allowed))}"
        )


def check_head_dim(model: ModelFacts, device: DeviceSpec | None) -> None:
    """Raises ValueError when vLLM cannot run the model's attention on this machine's CPU."""
    if device is not None and device.device == "cpu" and model.head_dim not in CPU_HEAD_DIMS:
        raise ValueError(
            f"model.path: {model.path} has attention heads of dimension {model.head_dim}; on a CPU vLLM runs "
            f"{', '.join(map(str, CPU_HEAD_DIMS))} only: take another model, or a GPU (model.device: cuda)"
        )


def load_data(config: RLConfig | EvalConfig) -> PromptSets:
    """The prompts. Raises ValueError: no chat template, or what data_feeds says of a source."""
    from data_feeds.chat.template import load_tokenizer
    from data_feeds.prompts.prompts import load_prompts

    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    return load_prompts(config.data, tokenizer)


def check_adapter(lora: Lora | None, model: Model) -> AdapterSize | None:
    """What the configured adapter amounts to. Raises ValueError: it does not fit the model, or there is none to start from."""
    if lora is None:
        return None
    from orchestration.model.adapter_files import check_start
    from orchestration.model.lora import adapter_size

    check_start(lora, model.path)
    return adapter_size(model, lora)


def second_models(config: RLConfig | EvalConfig, adapter: AdapterSize | None) -> SecondModels:
    """What the trainer holds beside the policy under this method and objective."""
    if not isinstance(config, RLConfig):
        return SecondModels()
    needs = method_for(config).needs()
    return SecondModels(
        reference="ref_logprobs" in needs or config.objective.kl.coef > 0,
        critic="values" in needs and config.critic.kind == "separate",
        adapter=adapter,
    )


def check_shared_memory(config: RLConfig | EvalConfig, memory: MemoryEstimate) -> None:
    """Raises ValueError when sync.method direct has no room for one version of the weights."""
    if not isinstance(config, RLConfig) or config.sync.method != "direct":
        return
    if not SHARED_MEMORY.is_dir():
        raise ValueError(f"sync.method: direct needs {SHARED_MEMORY}, which this machine lacks; use sync.method: disk")
    if (free := shutil.disk_usage(SHARED_MEMORY).free) < memory.sync:
        raise ValueError(
            f"sync.method: direct needs {shown(memory.sync)} of {SHARED_MEMORY} for the weights, {shown(free)} are free; "
            "give the container more (docker run --shm-size), or use sync.method: disk"
        )


def check_disk(config: RLConfig | EvalConfig, memory: MemoryEstimate) -> None:
    """Raises ValueError when the run directory's disk has no room for what is sure to be written."""
    if not isinstance(config, RLConfig):
        return
    on_disk = memory.checkpoints + (memory.sync if config.sync.method == "disk" else 0)
    parent = existing_parent(run_directory(config))
    if (free := shutil.disk_usage(parent).free) < on_disk:
        raise ValueError(
            f"run.dir: checkpoints{' and weight sync' if config.sync.method == 'disk' else ''} need {shown(on_disk)} on "
            f"the disk of {parent}, {shown(free)} are free; lower checkpoint.keep, or choose another with --run-dir"
        )


def warnings_about(
    config: RLConfig | EvalConfig, device: DeviceSpec, prompts: PromptSets, memory: MemoryEstimate
) -> list[str]:
    """What files and machine make worth saying, one sentence each, beginning with the key."""
    found = []
    if prompts.too_long:
        found.append(f"data.max_prompt_tokens: {prompts.too_long} rows are longer than that and left out")
    if not isinstance(config, RLConfig):
        return found
    train, rollout = config.train, config.rollout
    at_once = Admission.of(config.schedule, rollout.prompts_per_step).most_outstanding
    if len(prompts.train) < at_once:
        found.append(
            f"rollout.prompts_per_step: up to {at_once} groups are under way at once, from {len(prompts.train)} training "
            "prompts: some prompts are in several of them"
        )
    if rollout.prompts_per_step < rollout.engines:
        found.append(
            f"rollout.engines: {rollout.engines} engines for {rollout.prompts_per_step} prompts a step: a prompt's responses "
            "stay on one engine, so some are idle; raise rollout.prompts_per_step"
        )
    if "RAY_ADDRESS" in os.environ and config.sync.method == "direct":
        found.append(
            "sync.method: direct reaches engines on the trainer's machine only; on a cluster of several use nccl or disk"
        )
    if device.device != "cpu" or "RAY_ADDRESS" in os.environ:
        return found
    from orchestration.cluster.cpu_cores import core_warnings

    found += core_warnings(EngineJob.of_rl(config), TrainerJob.of_rl(config), device)
    total = train.ranks * memory.trainer_total + rollout.engines * memory.engine_total + memory.sync
    if total > machine_memory():
        found.append(
            f"memory: about {shown(total)} will be needed, {shown(machine_memory())} are there; lower "
            "train.max_tokens_per_micro_batch, set model.gradient_checkpointing, or take a smaller model"
        )
    return found
