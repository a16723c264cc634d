"""What a job will do, in tables: `--dry-run`."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table

from configs.blocks.block import Named
from configs.blocks.lora import Lora
from configs.blocks.placement import colocate
from configs.blocks.rl import EvalConfig, RLConfig
from configs.reading.load import method_for, run_directory
from orchestration.cluster.cpu_cores import CorePlan, core_plan
from orchestration.cluster.devices import DeviceSpec, shares_gpus
from orchestration.cluster.job_shape import EngineJob, TrainerJob
from orchestration.start.memory_estimate import shown
from orchestration.start.preflight import Checked
from plugins.components import aggregation_for
from rollouts.admission import Admission

Row = tuple[str, str]
Section = tuple[str, Iterable[Row]]


def print_plan(config: RLConfig | EvalConfig, checked: Checked, console: Console | None = None) -> None:
    """Print the resolved plan of a checked job. Writes no file."""
    sections: list[Section] = [
        ("model", model_rows(config, checked)),
        ("objective", objective_rows(config) if isinstance(config, RLConfig) else ()),
        ("devices", device_rows(config, checked)),
        ("data", data_rows(config, checked)),
        ("work", work_rows(config, checked)),
        ("memory, estimated", memory_rows(config, checked)),
        ("files", file_rows(config)),
    ]
    what = config.algorithm.name if isinstance(config, RLConfig) else "evaluation"
    print_sections(sections, f"{run_directory(config)} ({what})", checked.warnings, console)


def print_sections(sections: list[Section], of_what: str, warnings: list[str], console: Console | None = None) -> None:
    """Print a plan: sections of rows, then the warnings."""
    if console is None:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for title, rows in sections:
        for index, (name, value) in enumerate(rows):
            table.add_row(title if index == 0 else "", name, value)
        table.add_section()
    notes = [f"[yellow]warning[/]: {text}" for text in warnings] or ["no warnings"]
    title = f"plan of {of_what}; nothing was started or written"
    console.print(Panel(Group(table, "", *notes), title=title, title_align="left", border_style="dim"))


def model_rows(config: RLConfig | EvalConfig, checked: Checked) -> Iterable[Row]:
    model = checked.model
    yield "path", config.model.path
    yield "kind", f"{model.architecture}, {model.parameters:,} parameters, {config.model.dtype} compute"
    if isinstance(config, RLConfig):
        if config.lora is not None and checked.adapter is not None:
            yield "adapter", adapter_row(config.lora, checked)
        params = ", ".join(f"{key} {value}" for key, value in config.algorithm.params.items())
        yield "algorithm", f"{config.algorithm.name}{f' ({params})' if params else ''}"


def adapter_row(lora: Lora, checked: Checked) -> str:
    """What LoRA trains, and what that saves."""
    assert checked.adapter is not None
    trained, whole = checked.adapter.parameters, checked.model.parameters
    begins = f", begins as {lora.adapter}" if lora.adapter else ""
    return (
        f"LoRA of rank {lora.rank} on {checked.adapter.matrices} matrices: {trained:,} trained parameters "
        f"({trained / whole:.1%} of the model's), {shown(checked.memory.saved_by_adapter)} less per trainer rank than training "
        f"every weight{begins}; engines take the {lora.sync if lora.sync == 'adapter' else 'merged model'}"
    )


def objective_rows(config: RLConfig) -> Iterable[Row]:
    """What stands around the method's loss; rows of what is off are left out."""
    from orchestration.trainer.token_objective import TokenObjective

    method, o = method_for(config), config.objective
    yield "advantage", named(o.advantage) if o.advantage else f"{config.algorithm.name}'s own"
    yield "aggregation", aggregation_for(o, method)
    if o.kl.coef > 0:
        yield "KL", f"{o.kl.coef:g} x {o.kl.estimator} to the starting policy, in the {o.kl.placement}"
    if o.entropy_coef > 0:
        yield "entropy", f"bonus of {o.entropy_coef:g} per nat"
    if o.corrections:
        yield "corrections", ", ".join(map(named, o.corrections)) + f"; rejected tokens {o.rejected_tokens}"
    if "values" in method.needs():
        yield "critic", f"{config.critic.kind}, {config.critic.warmup_steps} warm-up steps"
    for index, chosen in enumerate(config.rollout.filters):
        yield f"filter {index + 1}", named(chosen)
    early = TokenObjective(method, o).recomputed_columns(config.train.updates_per_step)
    if early:
        yield "forward first", f"{', '.join(early)}: passes of their own before a step's first update"


def named(block: Named) -> str:
    """A function and its arguments as text."""
    params = ", ".join(f"{key} {value}" for key, value in block.params.items())
    return f"{block.function}{f' ({params})' if params else ''}"


def device_rows(config: RLConfig | EvalConfig, checked: Checked) -> Iterable[Row]:
    device = checked.device
    yield "machine", f"{device.device}: {device.cores} CPU cores, {device.gpus} GPUs"
    block = config.rollout if isinstance(config, RLConfig) else config
    unit = "GPU" if device.device == "cuda" else "process"
    if isinstance(config, RLConfig):
        train = config.train
        cores = core_plan(EngineJob.of_rl(config), TrainerJob.of_rl(config), device)
        yield "placement", placement_row(config, device, cores)
        yield (
            "trainer",
            f"{train.ranks} rank(s), ZeRO {train.zero_stage}, {cores.trainer_threads} thread(s) each, {device.backend}",
        )
        yield (
            "weight sync",
            f"{config.sync.method}, then a log-probability probe of {config.sync.probe_prompts} prompts",
        )
    yield "engines", f"{block.engines} vLLM engine(s) of {block.tensor_parallel_size} {unit}(s)"
    yield "scoring", f"{config.reward.workers} process(es) beside each engine"


def placement_row(config: RLConfig, device: DeviceSpec, cores: CorePlan) -> str:
    """Who works where: on the same devices in turn, or on their own."""
    rollout, ranks = config.rollout, config.train.ranks
    engines, devices = rollout.engines, rollout.engines * rollout.tensor_parallel_size
    if device.device == "cuda" and "RAY_ADDRESS" in os.environ:
        return "as the cluster's GPUs allow"
    if device.device == "cuda":
        if shares_gpus(ranks, engines, rollout.tensor_parallel_size, device.gpus, colocate(config)):
            return "colocated: rank i and engine i share GPU i in turn, the engine sleeps while the trainer works"
        return f"separate: {ranks} GPU(s) for the trainer, {devices} for engines"
    if not cores.together:
        return f"colocated: trainer ({cores.trainer_threads} thread(s) a rank) and engines ({cores.engine_threads} a process) in turn"
    shares = (
        f"separate, at the same time: trainer {ranks} x {cores.trainer_threads} thread(s), engines {devices} x "
        f"{cores.engine_threads}, on {device.cores} cores"
    )
    if not config.placement.bind_cores:
        return f"{shares}; not bound"
    return f"{shares}; bound: ranks to cores {_listed(cores.trainer_cores)}, engines to {_listed(cores.engine_cores)}"


def _listed(groups: Iterable[Iterable[int]]) -> str:
    return " | ".join(",".join(map(str, group)) for group in groups)


def data_rows(config: RLConfig | EvalConfig, checked: Checked) -> Iterable[Row]:
    prompts = checked.prompts
    by_source: dict[str, int] = {}
    for prompt in prompts.train:
        by_source[prompt.source] = by_source.get(prompt.source, 0) + 1
    yield "training", f"{len(prompts.train)} prompts ({', '.join(f'{n} {name}' for name, n in by_source.items())})"
    yield "held out", f"{len(prompts.heldout)} prompts, split by {config.data.split_by}"
    yield "left out", f"{prompts.duplicates} duplicates, {prompts.too_long} too long, {prompts.leaks} also held out"


def schedule_row(config: RLConfig) -> str:
    """When generation and training run, and how old a token may be."""
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


def work_rows(config: RLConfig | EvalConfig, checked: Checked) -> Iterable[Row]:
    if not isinstance(config, RLConfig):
        yield from _evaluation_rows(config, checked)
        return
    rollout, train = config.rollout, config.train
    sequences = rollout.prompts_per_step * rollout.responses_per_prompt
    most_new = sequences * rollout.max_new_tokens
    prompts_computed = rollout.prompts_per_step if train.share_prompts else sequences
    most_trained = most_new + prompts_computed * config.data.max_prompt_tokens
    micro_batches = max(
        1, math.ceil(most_trained / train.updates_per_step / train.max_tokens_per_micro_batch / train.ranks)
    )
    asked = train.steps * rollout.prompts_per_step
    yield (
        "a step",
        (
            f"{rollout.prompts_per_step} prompts x {rollout.responses_per_prompt} responses = {sequences} sequences, at most "
            f"{most_new:,} new tokens"
        ),
    )
    yield (
        "training",
        (
            f"{train.updates_per_step} optimizer step(s) of {sequences // train.updates_per_step} sequences, at most "
            f"{micro_batches} micro-batch(es) of {train.max_tokens_per_micro_batch:,} tokens per rank"
        ),
    )
    yield (
        "steps",
        (
            f"{train.steps} steps = {train.steps * train.updates_per_step} optimizer steps, {asked} prompts asked = "
            f"{asked / len(checked.prompts.train):.1f} epochs"
        ),
    )
    yield "schedule", schedule_row(config)
    yield "learning rate", (
        f"{train.learning_rate:g}, {train.schedule}" + (f" to {train.min_learning_rate:g}" if train.schedule != "constant" else "")
        + (f", {train.warmup_steps} warm-up steps" if train.warmup_steps else "")
    )  # fmt: skip
    every = config.eval.every
    times = 2 + ((train.steps - 1) // every if every else 0)
    used = min(config.eval.max_prompts, len(checked.prompts.heldout))
    yield (
        "evaluation",
        (
            f"{times} times, {used} held-out prompts x {config.eval.samples_per_prompt}, temperature {config.eval.temperature:g}"
        ),
    )


def _evaluation_rows(config: EvalConfig, checked: Checked) -> Iterable[Row]:
    available = len(checked.prompts.part(config.eval.split))
    used = min(config.eval.max_prompts, available)
    sequences = used * (config.eval.samples_per_prompt + config.eval.greedy)
    yield "judged on", f"{used} of {available} prompts ({config.eval.split})"
    yield (
        "responses",
        (
            f"{config.eval.samples_per_prompt} samples at temperature {config.eval.temperature:g}"
            f"{' and 1 greedy' if config.eval.greedy else ''} each = {sequences} sequences, at most "
            f"{sequences * config.eval.max_new_tokens:,} new tokens"
        ),
    )


def memory_rows(config: RLConfig | EvalConfig, checked: Checked) -> Iterable[Row]:
    memory = checked.memory
    for name, parts, total in (
        ("a trainer rank", memory.trainer, memory.trainer_total),
        ("an engine", memory.engine, memory.engine_total),
    ):
        if parts:
            yield name, f"{shown(total)} = {' + '.join(f'{shown(size)} {part}' for part, size in parts.items())}"
    if isinstance(config, RLConfig):
        if config.sync.method == "nccl":
            buckets = f", two buckets of sync.bucket_mib, {config.sync.bucket_mib:g} MiB, on each side's device"
            yield (
                "weight sync",
                f"{shown(memory.sync)} by broadcast{buckets if checked.device.device == 'cuda' else ''}",
            )
        else:
            where = "shared memory" if config.sync.method == "direct" else "disk"
            yield "weight sync", f"{shown(memory.sync)} of {where}"
        yield "checkpoints", f"{shown(memory.checkpoints)} of disk"


def file_rows(config: RLConfig | EvalConfig) -> Iterable[Row]:
    yield "run directory", str(run_directory(config))
    if isinstance(config, RLConfig):
        yield (
            "written there",
            "config.yaml, environment.json, metrics.jsonl, samples/, logs/, checkpoints/, report.html",
        )
    else:
        yield (
            "written there",
            "config.yaml, environment.json, metrics.jsonl, evaluation.json, samples/, logs/, report.html",
        )
