"""The plan of a reinforcement learning job."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from configs.blocks.rl import RLConfig
from configs.reading.load import method_for, run_directory
from orchestration.cluster.cpu_cores import CorePlan, core_plan
from orchestration.cluster.devices import DeviceSpec, shares_gpus
from orchestration.cluster.job_shape import EngineJob, TrainerJob
from orchestration.start.memory_estimate import memory_of_rl, shown
from orchestration.start.plan import Plan, Row, adapter_text, algorithm_row, function_text, model_rows
from orchestration.start.plan_engines import data_rows, engine_rows, machine_row, memory_row
from orchestration.start.preflight import Checked
from rollouts.admission import Admission

if TYPE_CHECKING:
    from data_feeds.prompts.prompts import PromptSets


def plan_rl(config: RLConfig, checked: Checked, prompts: PromptSets) -> Plan:
    """Return the plan of a checked reinforcement learning job."""
    files = "config.yaml, environment.json, metrics.jsonl, samples/, logs/, checkpoints/, report.html"
    return Plan(
        f"{run_directory(config)} ({config.algorithm.name})",
        [
            ("model", _model_rows(config, checked)),
            ("objective", objective_rows(config)),
            ("devices", _device_rows(config, checked.device)),
            ("data", data_rows(config.data, prompts)),
            ("work", _work_rows(config, prompts)),
            ("memory, estimated", _memory_rows(config, checked)),
            ("files", [("run directory", str(run_directory(config))), ("written there", files)]),
        ],
    )


def _model_rows(config: RLConfig, checked: Checked) -> Iterable[Row]:
    yield from model_rows(config.model, checked)
    if config.lora is not None:
        memory = memory_of_rl(config, checked.model, checked.adapter, checked.device.device)
        begins = f", begins as {config.lora.adapter}" if config.lora.adapter else ""
        yield (
            "adapter",
            f"{adapter_text(config.lora, checked)}, {shown(memory.saved_by_adapter)} less per trainer rank than training "
            f"every weight{begins}; engines take the {config.lora.sync if config.lora.sync == 'adapter' else 'merged model'}",
        )
    yield algorithm_row(config.algorithm)


def objective_rows(config: RLConfig) -> Iterable[Row]:
    """Yield the rows on the settings around the method's loss; what is off has no row."""
    from orchestration.trainer.token_objective import TokenObjective

    method, o = method_for(config), config.objective
    yield "advantage", function_text(o.advantage) if o.advantage else f"{config.algorithm.name}'s own"
    yield "aggregation", o.aggregation_mode(method)
    if o.kl.coef > 0:
        yield (
            "KL",
            f"{o.kl.coef:g} x {o.kl.estimator_used} to the starting policy, in the {o.kl.placement}{', x pi / mu' if o.kl.importance else ''}",
        )
    if o.entropy_coef > 0:
        yield "entropy", f"bonus of {o.entropy_coef:g} per nat"
    if o.corrections:
        yield "corrections", ", ".join(map(function_text, o.corrections)) + f"; rejected tokens {o.rejected_tokens}"
    if "values" in method.needs():
        yield "critic", f"{config.critic.kind}, {config.critic.warmup_steps} warm-up steps"
    for index, chosen in enumerate(config.rollout.filters):
        yield f"filter {index + 1}", function_text(chosen)
    early = TokenObjective(method, o).recomputed_columns(config.train.updates_in_step)
    if early:
        yield "forward first", f"{', '.join(early)}: passes of their own before a step's first update"


def _device_rows(config: RLConfig, device: DeviceSpec) -> Iterable[Row]:
    train, engine_job, trainer_job = config.train, EngineJob.of_rl(config), TrainerJob.of_rl(config)
    cores = core_plan(engine_job, trainer_job, device)
    yield machine_row(device)
    yield "placement", placement_text(engine_job, trainer_job, device, cores)
    yield (
        "trainer",
        f"{train.ranks} rank(s), ZeRO {train.zero_stage}, {cores.trainer_threads} thread(s) each, {device.backend}",
    )
    probe = f"a log-probability probe of {config.sync.probe_prompts} prompts"
    yield "weight sync", f"{config.sync.method}, then {probe}"
    yield from engine_rows(engine_job, device)


def placement_text(engine_job: EngineJob, trainer_job: TrainerJob, device: DeviceSpec, cores: CorePlan) -> str:
    """Return a text on who works where: on the same devices in turn, or on devices of their own."""
    ranks, engines, devices = trainer_job.ranks, engine_job.engines, engine_job.processes
    if device.device == "cuda" and "RAY_ADDRESS" in os.environ:
        return "as the cluster's GPUs allow"
    if device.device == "cuda":
        if shares_gpus(ranks, engines, engine_job.tensor_parallel_size, device.gpus, trainer_job.colocate):
            return "colocated: rank i and engine i share GPU i in turn, the engine sleeps while the trainer works"
        return f"separate: {ranks} GPU(s) for the trainer, {devices} for engines"
    if not cores.together:
        return f"colocated: trainer ({cores.trainer_threads} thread(s) a rank) and engines ({cores.engine_threads} a process) in turn"
    shares = (
        f"separate, at the same time: trainer {ranks} x {cores.trainer_threads} thread(s), engines {devices} x "
        f"{cores.engine_threads}, on {device.cores} cores"
    )
    if not trainer_job.placement.bind_cores:
        return f"{shares}; not bound"
    return f"{shares}; bound: ranks to cores {_listed(cores.trainer_cores)}, engines to {_listed(cores.engine_cores)}"


def _listed(groups: Iterable[Iterable[int]]) -> str:
    return " | ".join(",".join(map(str, group)) for group in groups)


def schedule_text(config: RLConfig) -> str:
    """Return a text on when generation and training run, and how old a token may be."""
    schedule, prompts = config.schedule, config.rollout.prompts_per_step
    reused = (
        f"; {schedule.replay_buffer_share:.0%} of a batch reused for {schedule.replay_buffer_versions} versions"
        if schedule.replay_buffer_share
        else ""
    )
    if schedule.mode == "sync":
        return f"sync: generate, train, sync weights, in turn{reused}"
    most = Admission.of(schedule, prompts).most_outstanding
    together = "in turn, asked ahead" if schedule.pause_while_training else "at the same time"
    return (
        f"overlap: generation and training {together}; tokens at most {schedule.max_staleness} version(s) old, at most "
        f"{most} groups under way; when weights come, responses under way: {schedule.in_flight}{reused}"
    )


def _work_rows(config: RLConfig, prompts: PromptSets) -> Iterable[Row]:
    rollout, train = config.rollout, config.train
    sequences = rollout.prompts_per_step * rollout.responses_per_prompt
    most_new = sequences * rollout.max_new_tokens
    prompts_computed = rollout.prompts_per_step if train.share_prompts else sequences
    most_trained = most_new + prompts_computed * config.data.max_prompt_tokens
    micro_batches = max(
        1, math.ceil(most_trained / train.updates_per_step / train.max_tokens_per_micro_batch / train.ranks)
    )
    passes = f" in {train.passes_per_batch} passes over the batch" if train.passes_per_batch > 1 else ""
    asked = train.steps * rollout.prompts_per_step
    yield (
        "a step",
        f"{rollout.prompts_per_step} prompts x {rollout.responses_per_prompt} responses = {sequences} sequences, at most "
        f"{most_new:,} new tokens",
    )
    yield (
        "training",
        f"{train.updates_in_step} optimizer step(s) of {sequences // train.updates_per_step} sequences{passes}, at most "
        f"{micro_batches} micro-batch(es) of {train.max_tokens_per_micro_batch:,} tokens per rank",
    )
    yield (
        "steps",
        f"{train.steps} steps = {train.steps * train.updates_in_step} optimizer steps, {asked} prompts asked = "
        f"{asked / len(prompts.train):.1f} epochs",
    )
    yield "schedule", schedule_text(config)
    yield "learning rate", (
        f"{train.learning_rate:g}, {train.schedule}" + (f" to {train.min_learning_rate:g}" if train.schedule != "constant" else "")
        + (f", {train.warmup_steps} warm-up steps" if train.warmup_steps else "")
    )  # fmt: skip
    every = config.eval.every
    times = 2 + ((train.steps - 1) // every if every else 0)
    used = min(config.eval.max_prompts, len(prompts.heldout))
    yield (
        "evaluation",
        f"{times} times, {used} held-out prompts x {config.eval.samples_per_prompt}, temperature "
        f"{config.eval.temperature:g}",
    )


def _memory_rows(config: RLConfig, checked: Checked) -> Iterable[Row]:
    memory = memory_of_rl(config, checked.model, checked.adapter, checked.device.device)
    yield memory_row("a trainer rank", memory.trainer)
    yield memory_row("an engine", memory.engine)
    if config.sync.method == "nccl":
        buckets = f", two buckets of sync.bucket_mib, {config.sync.bucket_mib:g} MiB, on each side's device"
        on_gpus = buckets if checked.device.device == "cuda" else ""
        yield "weight sync", f"{shown(memory.sync)} by broadcast{on_gpus}"
    else:
        where = "shared memory" if config.sync.method == "direct" else "disk"
        yield "weight sync", f"{shown(memory.sync)} of {where}"
    yield "checkpoints", f"{shown(memory.checkpoints)} of disk"
