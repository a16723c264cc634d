"""Make the plan of an evaluation, and the rows of every job with engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from configs.blocks.evaluation import EvalConfig
from configs.blocks.rl import Data
from configs.reading.load import run_directory
from orchestration.cluster.devices import DeviceSpec
from orchestration.cluster.job_shape import EngineJob
from orchestration.start.memory_estimate import memory_of_engine, shown
from orchestration.start.plan import Plan, Row, model_rows
from orchestration.start.preflight import Checked

if TYPE_CHECKING:
    from data_feeds.prompts.prompts import PromptSets


def plan_eval(config: EvalConfig, checked: Checked, prompts: PromptSets) -> Plan:
    """Return the plan of a checked evaluation."""
    job, device = EngineJob.of_eval(config), checked.device
    files = "config.yaml, environment.json, metrics.jsonl, evaluation.json, samples/, logs/, report.html"
    return Plan(
        f"{run_directory(config)} (evaluation)",
        [
            ("model", model_rows(config.model, checked)),
            ("devices", [machine_row(device), *engine_rows(job, device)]),
            ("data", data_rows(config.data, prompts)),
            ("work", _work_rows(config, prompts)),
            ("memory, estimated", [memory_row("an engine", memory_of_engine(job, checked.model, device.device))]),
            ("files", [("run directory", str(run_directory(config))), ("written there", files)]),
        ],
    )


def _work_rows(config: EvalConfig, prompts: PromptSets) -> Iterable[Row]:
    available = len(prompts.part(config.eval.split))
    used = min(config.eval.max_prompts, available)
    sequences = used * (config.eval.samples_per_prompt + config.eval.greedy)
    yield "judged on", f"{used} of {available} prompts ({config.eval.split})"
    yield (
        "responses",
        f"{config.eval.samples_per_prompt} samples at temperature {config.eval.temperature:g}"
        f"{' and 1 greedy' if config.eval.greedy else ''} each = {sequences} sequences, at most "
        f"{sequences * config.eval.max_new_tokens:,} new tokens",
    )


def machine_row(device: DeviceSpec) -> Row:
    """Return the row about this machine."""
    return "machine", f"{device.device}: {device.cores} CPU cores, {device.gpus} GPUs"


def engine_rows(job: EngineJob, device: DeviceSpec) -> Iterable[Row]:
    """Yield the rows about generation and scoring."""
    unit = "GPU" if device.device == "cuda" else "process"
    yield "engines", f"{job.engines} vLLM engine(s) of {job.tensor_parallel_size} {unit}(s)"
    yield "scoring", f"{job.reward.workers} process(es) beside each engine"


def data_rows(data: Data, prompts: PromptSets) -> Iterable[Row]:
    """Yield the rows about the prompts, and about those left out."""
    by_source = Counter(prompt.source for prompt in prompts.train)
    sources = ", ".join(f"{count} {name}" for name, count in by_source.items())
    yield "training", f"{len(prompts.train)} prompts ({sources})"
    yield "held out", f"{len(prompts.heldout)} prompts, split by {data.split_by}"
    yield "left out", f"{prompts.duplicates} duplicates, {prompts.too_long} too long, {prompts.leaks} also held out"


def memory_row(name: str, parts: dict[str, int]) -> Row:
    """Return the row about one process's memory, by purpose."""
    return name, f"{shown(sum(parts.values()))} = {' + '.join(f'{shown(size)} {part}' for part, size in parts.items())}"
