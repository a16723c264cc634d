"""Checks of files and machine before a supervised job starts, and its plan. All checks run, so that one message lists all
that is wrong; nothing is written."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from algs.method import PolicyMethod
from configs.blocks.supervised import SLConfig, sl_warnings
from configs.reading.load import ConfigError, run_directory
from orchestration.cluster.launcher_rank import is_first_rank
from orchestration.model.checkpoint_facts import ModelFacts, model_facts
from plugins import methods as algorithm

if TYPE_CHECKING:
    from data_feeds.examples.supervised_data import SupervisedData
    from orchestration.cluster.devices import DeviceSpec
    from orchestration.model.lora import AdapterSize

T = TypeVar("T")
Row = tuple[str, str]


@dataclass(frozen=True)
class SLChecked:
    """What the checks found out on the way, for the plan and the run."""

    device: DeviceSpec
    model: ModelFacts
    method: PolicyMethod
    feed: SupervisedData
    steps: int  # optimizer steps
    warnings: list[str]
    adapter: AdapterSize | None = None  # of a job with lora


def supervised_preflight(config: SLConfig, is_resumed: bool = False) -> SLChecked:
    """Check files and machine for a job; one that is resumed finds its run directory full. Raises: ConfigError, with every
    problem found."""
    from orchestration.cluster.devices import resolve
    from orchestration.run.directory import check_free
    from orchestration.start.preflight import check_adapter, check_writable

    problems: list[str] = []

    def attempt(check: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return check(*arguments)
        except ValueError as error:
            problems.append(str(error))
            return None

    if is_first_rank():  # the others come when it may have made the folder already
        if not is_resumed:
            attempt(check_free, run_directory(config))
        attempt(check_writable, run_directory(config))
    method = algorithm.built(config.algorithm)
    model = attempt(model_facts, config.model)
    device = attempt(resolve, config.model.device)
    feed = adapter = None
    if model is not None:
        attempt(check_positions, config, model)
        adapter = attempt(check_adapter, config.lora, config.model)
        feed = attempt(load_supervised_data, config, method)
    if problems:
        raise ConfigError(problems[0] if len(problems) == 1 else "\n  ".join([f"{len(problems)} problems", *problems]))
    assert device is not None and model is not None and feed is not None
    steps = config.train.steps or math.ceil(config.train.epochs * feed.training_rows / config.train.batch_size)
    warnings = [*sl_warnings(config), *_about(config, feed, steps)]
    return SLChecked(device, model, method, feed, steps, warnings, adapter)


def check_positions(config: SLConfig, model: ModelFacts) -> None:
    """Raises ValueError when examples may be longer than the model's positions."""
    if model.max_positions is not None and config.data.max_tokens > model.max_positions:
        raise ValueError(
            f"data.max_tokens: {config.data.max_tokens}, but {model.path} has {model.max_positions} positions; lower it"
        )


def load_supervised_data(config: SLConfig, method: PolicyMethod) -> SupervisedData:
    """The examples. Raises ValueError: no chat template, or what data_feeds says of a source."""
    from data_feeds.chat.template import load_tokenizer
    from data_feeds.examples import supervised_data

    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    kind, most = method.data, config.eval.max_examples
    return supervised_data.load_supervised_data(config.data, kind, tokenizer, config.run.seed, most)  # type: ignore[arg-type]


def _about(config: SLConfig, feed: SupervisedData, steps: int) -> Iterable[str]:
    if not feed.heldout:
        yield "data.heldout_fraction: nothing is held out, so there is no held-out loss"
    if config.train.warmup_steps >= steps:
        yield f"train.warmup_steps: {config.train.warmup_steps} is not below the run's {steps} steps: the rate never peaks"
    if feed.training_rows < config.train.batch_size:
        yield (
            f"train.batch_size: {config.train.batch_size} is above the {feed.training_rows} training examples; a batch then holds "
            "examples of several epochs"
        )


def plan_sections(config: SLConfig, checked: SLChecked) -> list[tuple[str, Iterable[Row]]]:
    """The resolved job in tables, for --dry-run."""
    train, ranks = config.train, int(os.environ.get("WORLD_SIZE", "1"))
    unit = "pairs" if checked.method.data == "pairs" else "examples"
    params = ", ".join(f"{key} {value}" for key, value in config.algorithm.params.items())
    model = [
        ("path", config.model.path),
        (
            "kind",
            f"{checked.model.architecture}, {checked.model.parameters:,} parameters, {config.model.dtype} compute",
        ),
        ("algorithm", f"{config.algorithm.name}{f' ({params})' if params else ''}"),
        ("aggregation", config.objective.aggregation or checked.method.aggregation),
    ]
    if config.lora is not None and checked.adapter is not None:
        share = checked.adapter.parameters / checked.model.parameters
        model.append(
            (
                "adapter",
                f"LoRA of rank {config.lora.rank} on {checked.adapter.matrices} matrices: {share:.1%} of the model's size",
            )
        )
    if "ref_logprobs" in checked.method.needs():
        model.append(("reference", config.objective.reference))
    work = [
        ("a step", f"{train.batch_size} {unit} over {ranks} rank(s), ZeRO {train.zero_stage}"),
        ("steps", f"{checked.steps} optimizer steps = {checked.steps * train.batch_size / checked.feed.training_rows:.2f} epochs"),
        ("learning rate", f"{train.learning_rate:g}, {train.schedule}, {train.warmup_steps} warm-up steps"),
        ("evaluation", f"every {config.eval.every or 'no'} steps, before and after, {len(checked.feed.heldout)} held-out {unit}"),
    ]  # fmt: skip
    data = [("rows" if i == 0 else "", line.strip()) for i, line in enumerate(str(checked.feed).splitlines())]
    return [
        ("model", model),
        ("data", data),
        ("work", work),
        ("files", [("run directory", str(run_directory(config)))]),
    ]
