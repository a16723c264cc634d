"""The plan of a supervised job."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from configs.blocks.supervised import SLConfig
from configs.reading.load import run_directory
from orchestration.start.load_data import supervised_steps
from orchestration.start.plan import Plan, Row, adapter_text, algorithm_row, model_rows
from orchestration.start.preflight import Checked

if TYPE_CHECKING:
    from data_feeds.examples.supervised_data import SupervisedData


def plan_sl(config: SLConfig, checked: Checked, examples: SupervisedData) -> Plan:
    """Return the plan of a checked supervised job."""
    lines = [line.strip() for line in str(examples).splitlines()]
    return Plan(
        f"{run_directory(config)} ({config.algorithm.name})",
        [
            ("model", _model_rows(config, checked)),
            ("data", [("rows" if index == 0 else "", line) for index, line in enumerate(lines)]),
            ("work", _work_rows(config, examples)),
            ("files", [("run directory", str(run_directory(config)))]),
        ],
    )


def _model_rows(config: SLConfig, checked: Checked) -> Iterable[Row]:
    method = config.algorithm.make_method()
    yield from model_rows(config.model, checked)
    yield algorithm_row(config.algorithm)
    yield "aggregation", config.objective.aggregation or method.aggregation
    if config.lora is not None:
        yield "adapter", adapter_text(config.lora, checked)
    if "ref_logprobs" in method.needs():
        yield "reference", config.objective.reference


def _work_rows(config: SLConfig, examples: SupervisedData) -> Iterable[Row]:
    train, ranks = config.train, int(os.environ.get("WORLD_SIZE", "1"))
    unit = "pairs" if config.algorithm.make_method().data == "pairs" else "examples"
    steps = supervised_steps(config, examples)
    epochs = steps * train.batch_size / examples.training_rows
    yield "a step", f"{train.batch_size} {unit} over {ranks} rank(s), ZeRO {train.zero_stage}"
    yield "steps", f"{steps} optimizer steps = {epochs:.2f} epochs"
    yield "learning rate", f"{train.learning_rate:g}, {train.schedule}, {train.warmup_steps} warm-up steps"
    often = config.eval.every or "no"
    yield "evaluation", f"every {often} steps, before and after, {len(examples.heldout)} held-out {unit}"
