"""Check files and machine before anything heavy starts: a mistake then costs seconds, not the start of the engines.

All checks run, so that one message lists all mistakes. Nothing is written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.blocks.evaluation import EvalConfig
from configs.blocks.lora import Lora
from configs.blocks.objective import Filter
from configs.blocks.rl import Model, RLConfig
from configs.reading.load import run_directory
from configs.rules.every_job import warnings_for
from orchestration.cluster.cpu_cores import core_plan, core_warnings
from orchestration.cluster.devices import DeviceSpec, resolve, shares_gpus
from orchestration.cluster.job_shape import EngineJob, TrainerJob
from orchestration.cluster.launcher_rank import is_first_rank
from orchestration.metrics.definitions import METRICS
from orchestration.model.checkpoint_facts import ModelFacts
from orchestration.model.rotary import refuse_dynamic
from orchestration.start.memory_estimate import MemoryEstimate, machine_memory, memory_of_rl, shown
from orchestration.start.problems import Problems
from plugins.kinds import find, labels
from plugins.parameters import check
from rollouts.admission import Admission

if TYPE_CHECKING:
    from data_feeds.prompts.prompts import PromptSets
    from orchestration.model.lora import AdapterSize

SHARED_MEMORY = Path("/dev/shm")
NEEDS_SEVERAL = ("zero_variance", "pass_rate")  # filters that leave out every group of one response
# Head dimensions that vLLM's CPU attention knows; a test compares them with the installed vLLM.
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


@dataclass(frozen=True)
class Checked:
    """The results of the checks that the plan shows."""

    device: DeviceSpec
    model: ModelFacts
    warnings: list[str]
    adapter: AdapterSize | None = None  # of a job with lora


def preflight_rl(config: RLConfig, model: ModelFacts | None, is_resumed: bool, problems: Problems) -> Checked | None:
    """Check files and machine for a reinforcement learning job; return None when there are problems.

    model: None when it is a problem itself; then the checks that need it are left out. is_resumed: the run directory
    holds the run to be resumed.
    """
    engine_job, trainer_job = EngineJob.of_rl(config), TrainerJob.of_rl(config)
    check_run_directory(run_directory(config), is_resumed, problems)
    device = problems.attempt(check_devices, engine_job, trainer_job)
    check_engines(engine_job, problems)
    for index, block in enumerate(config.rollout.filters):
        problems.attempt(check_filter, index, block, config.rollout.responses_per_prompt)
    if model is None:
        return None
    check_model(engine_job, model, device, problems)
    problems.attempt(refuse_dynamic, model.rotary, model.path)
    adapter = problems.attempt(check_adapter, config.lora, config.model)
    memory = memory_of_rl(config, model, adapter, device.device if device else "cpu")
    problems.attempt(check_shared_memory, config, memory)
    if config.sync.method == "disk":
        needed, what = memory.checkpoints + memory.sync, "checkpoints and weight sync"
    else:
        needed, what = memory.checkpoints, "checkpoints"
    problems.attempt(check_disk, run_directory(config), needed, what)
    if device is None or problems.texts:
        return None
    machine = machine_warnings(config, engine_job, trainer_job, device, memory)
    return Checked(device, model, [*warnings_for(config), *model_warnings(model), *machine], adapter)


def preflight_eval(
    config: EvalConfig, model: ModelFacts | None, is_resumed: bool, problems: Problems
) -> Checked | None:
    """Check files and machine for an evaluation, as `preflight_rl` does for training."""
    engine_job = EngineJob.of_eval(config)
    check_run_directory(run_directory(config), is_resumed, problems)
    device = problems.attempt(check_devices, engine_job, None)
    check_engines(engine_job, problems)
    if model is not None:
        check_model(engine_job, model, device, problems)
    if device is None or model is None or problems.texts:
        return None
    return Checked(device, model, warnings_for(config))


def check_run_directory(run: Path, is_resumed: bool, problems: Problems) -> None:
    """Check that the run directory is free, or holds the run to be resumed, and can be written."""
    from orchestration.run.directory import check_free

    if not is_first_rank():  # the first rank may have made it already
        return
    if not is_resumed:
        problems.attempt(check_free, run)
    problems.attempt(check_writable, run)


def check_engines(job: EngineJob, problems: Problems) -> None:
    """Check the rewards, the environment and vLLM's arguments."""
    for index, part in enumerate(job.reward.parts):
        problems.attempt(check_reward, index, part.function, part.params)
    problems.attempt(check_environment, job.environment)
    problems.attempt(check_engine_arguments, job.arguments)


def check_model(job: EngineJob, model: ModelFacts, device: DeviceSpec | None, problems: Problems) -> None:
    """Check that engines can run the model."""
    problems.attempt(check_model_fits, job, model)
    problems.attempt(check_head_dim, model, device)


def model_warnings(model: ModelFacts) -> Iterator[str]:
    """Yield warnings about a model that is to be trained."""
    if model.noise:
        yield (
            f"model.path: {model.path} asks for {model.noise} in training; it is switched off, because engines, old and "
            "reference log-probabilities have none (checkpoints say 0)"
        )


def check_writable(run: Path) -> None:
    """Raise ValueError unless the run directory could be made."""
    parent = existing_parent(run)
    if not parent.is_dir():
        raise ValueError(f"run.dir: {parent} is a file, so {run} cannot be made; choose another with --run-dir")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"run.dir: {parent} is not writable, so {run} cannot be made; choose another with --run-dir")


def existing_parent(path: Path) -> Path:
    """Return the path itself, or the nearest folder above that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def check_devices(engine_job: EngineJob, trainer_job: TrainerJob | None) -> DeviceSpec:
    """Return the device to run on.

    On a Ray cluster (RAY_ADDRESS) the other machines' devices are not known here: placement decides there.

    Raises:
        ValueError: the job wants more devices or cores than there are.
    """
    device = resolve(engine_job.model.device)
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
    """Raise ValueError unless the reward imports and takes its parameters, and its metric has a name of its own."""

    (label,) = labels([name])
    try:
        check("reward", name, params)
        if f"reward/{label}" in METRICS:
            raise ValueError(f"it would be logged as reward/{label}, which is another metric; rename the function")
    except ValueError as error:
        raise ValueError(f"reward.parts.{index}: {error}") from error


def check_filter(index: int, block: Filter, responses_per_prompt: int) -> None:
    """Raise ValueError unless the filter imports and takes the given parameters, and could keep a group."""

    what = f"filter '{block.function}'"
    try:
        check("filter", block.function, block.params)
        if responses_per_prompt == 1 and block.function in NEEDS_SEVERAL:
            raise ValueError(
                f"{what}: rollout.responses_per_prompt is 1, and one response never differs from itself, so every group "
                "would be left out; ask at least 2, or leave the filter out"
            )
    except ValueError as error:
        raise ValueError(f"rollout.filters.{index}: {error}") from error


def check_environment(name: str) -> None:
    """Raise ValueError when the environment does not import."""

    find("environment", name)


def check_engine_arguments(arguments: dict[str, Any]) -> None:
    """Raise ValueError when vLLM does not know an engine argument."""
    if arguments:
        from rollouts.vllm.settings import check_arguments  # imports vLLM: seconds

        check_arguments(arguments)


def check_model_fits(job: EngineJob, model: ModelFacts) -> None:
    """Raise ValueError when sequences are longer than the model's positions, or its heads do not split."""
    if model.max_positions is not None and job.max_model_len > model.max_positions:
        raise ValueError(
            f"data.max_prompt_tokens + {job.max_new_tokens_key} = {job.max_model_len} tokens, but {model.path} has "
            f"{model.max_positions} positions; lower one of them"
        )
    if model.heads % job.tensor_parallel_size:
        allowed = [n for n in range(1, model.heads + 1) if model.heads % n == 0]
        raise ValueError(
            f"{job.key_prefix}tensor_parallel_size: {model.heads} attention heads of {model.path} do not split over "
            f"{job.tensor_parallel_size} devices; use one of {', '.join(map(str, allowed))}"
        )


def check_head_dim(model: ModelFacts, device: DeviceSpec | None) -> None:
    """Raise ValueError when vLLM cannot run the model's attention on this machine's CPU."""
    if device is not None and device.device == "cpu" and model.head_dim not in CPU_HEAD_DIMS:
        raise ValueError(
            f"model.path: {model.path} has attention heads of dimension {model.head_dim}; on a CPU vLLM runs "
            f"{', '.join(map(str, CPU_HEAD_DIMS))} only: take another model, or a GPU (model.device: cuda)"
        )


def check_adapter(lora: Lora | None, model: Model) -> AdapterSize | None:
    """Return the size of the configured adapter, or None without one.

    Raises:
        ValueError: it does not fit the model, or there is none to start from.
    """
    if lora is None:
        return None
    from orchestration.model.adapter_files import check_start
    from orchestration.model.lora import adapter_size

    check_start(lora, model.path)
    return adapter_size(model, lora)


def check_shared_memory(config: RLConfig, memory: MemoryEstimate) -> None:
    """Raise ValueError when sync.method direct has no room for one version of the weights."""
    if config.sync.method != "direct":
        return
    if not SHARED_MEMORY.is_dir():
        raise ValueError(f"sync.method: direct needs {SHARED_MEMORY}, which this machine lacks; use sync.method: disk")
    if (free := shutil.disk_usage(SHARED_MEMORY).free) < memory.sync:
        raise ValueError(
            f"sync.method: direct needs {shown(memory.sync)} of {SHARED_MEMORY} for the weights, {shown(free)} are free; "
            "give the container more (docker run --shm-size), or use sync.method: disk"
        )


def check_disk(run: Path, needed: int, what: str = "checkpoints") -> None:
    """Raise ValueError when the run directory's disk has no room for what will certainly be written."""
    parent = existing_parent(run)
    if (free := shutil.disk_usage(parent).free) < needed:
        raise ValueError(
            f"run.dir: {what} need {shown(needed)} on the disk of {parent}, {shown(free)} are free; lower "
            "checkpoint.keep, or choose another with --run-dir"
        )


def data_warnings_of_rl(config: RLConfig, prompts: PromptSets) -> Iterator[str]:
    """Yield warnings about the prompts, one sentence each, beginning with the key."""
    yield from data_warnings_of_eval(config, prompts)
    at_once = Admission.of(config.schedule, config.rollout.prompts_per_step).most_outstanding
    if len(prompts.train) < at_once:
        yield (
            f"rollout.prompts_per_step: up to {at_once} groups are under way at once, from {len(prompts.train)} training "
            "prompts: some prompts are in several of them"
        )


def data_warnings_of_eval(config: RLConfig | EvalConfig, prompts: PromptSets) -> Iterator[str]:
    """Yield warnings about prompts that are only answered, not trained on."""
    if prompts.too_long:
        yield f"data.max_prompt_tokens: {prompts.too_long} rows are longer than that and left out"


def tried_rewards(config: RLConfig | EvalConfig, prompts: PromptSets) -> Iterator[str]:
    """Yield which rewards a dry run did not try; raise ConfigError when one cannot score a row of the job."""
    from orchestration.start.try_rewards import try_rewards

    yield from try_rewards(config.reward, (prompts.train or prompts.heldout)[0])


def machine_warnings(
    config: RLConfig, engine_job: EngineJob, trainer_job: TrainerJob, device: DeviceSpec, memory: MemoryEstimate
) -> Iterator[str]:
    """Yield warnings about the machine, one sentence each, beginning with the key."""
    if config.rollout.prompts_per_step < engine_job.engines:
        yield (
            f"rollout.engines: {engine_job.engines} engines for {config.rollout.prompts_per_step} prompts a step: a prompt's "
            "responses stay on one engine, so some are idle; raise rollout.prompts_per_step"
        )
    if "RAY_ADDRESS" in os.environ and config.sync.method == "direct":
        yield "sync.method: direct reaches engines on the trainer's machine only; on a cluster of several use nccl or disk"
    if device.device != "cpu" or "RAY_ADDRESS" in os.environ:
        return
    yield from core_warnings(engine_job, trainer_job, device)
    total = trainer_job.ranks * memory.trainer_total + engine_job.engines * memory.engine_total + memory.sync
    if total > machine_memory():
        yield (
            f"memory: about {shown(total)} will be needed, {shown(machine_memory())} are there; lower "
            "train.max_tokens_per_micro_batch, set model.gradient_checkpointing, or take a smaller model"
        )
