"""Check files and machine before a supervised job starts. All checks run; one message lists all mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from configs.blocks.supervised import SLConfig
from configs.reading.load import run_directory
from configs.rules.every_job import warnings_for
from orchestration.cluster.devices import resolve
from orchestration.model.checkpoint_facts import ModelFacts
from orchestration.model.rotary import refuse_dynamic
from orchestration.start.load_data import supervised_steps
from orchestration.start.memory_estimate import disk_of_sl
from orchestration.start.preflight import Checked, check_adapter, check_disk, check_run_directory, model_warnings
from orchestration.start.problems import Problems

if TYPE_CHECKING:
    from data_feeds.examples.supervised_data import SupervisedData


def preflight_sl(config: SLConfig, model: ModelFacts | None, is_resumed: bool, problems: Problems) -> Checked | None:
    """Check files and machine for a supervised job; return None when there are problems.

    model: None when it is a problem itself. is_resumed: the run directory holds the run to be resumed.
    """
    check_run_directory(run_directory(config), is_resumed, problems)
    device = problems.attempt(resolve, config.model.device)
    if model is None:
        return None
    problems.attempt(check_positions, config, model)
    problems.attempt(refuse_dynamic, model.rotary, model.path)
    adapter = problems.attempt(check_adapter, config.lora, config.model)
    problems.attempt(check_disk, run_directory(config), disk_of_sl(config, model, adapter))
    if device is None or problems.texts:
        return None
    return Checked(device, model, [*warnings_for(config), *model_warnings(model)], adapter)


def check_positions(config: SLConfig, model: ModelFacts) -> None:
    """Raise ValueError when examples may be longer than the model's positions."""
    if model.max_positions is not None and config.data.max_tokens > model.max_positions:
        raise ValueError(
            f"data.max_tokens: {config.data.max_tokens}, but {model.path} has {model.max_positions} positions; lower it"
        )


def data_warnings_of_sl(config: SLConfig, examples: SupervisedData) -> Iterator[str]:
    """Yield warnings about the examples, one sentence each, beginning with the key."""
    steps = supervised_steps(config, examples)
    if not examples.heldout:
        yield "data.heldout_fraction: nothing is held out, so there is no held-out loss"
    if config.train.warmup_steps >= steps:
        yield f"train.warmup_steps: {config.train.warmup_steps} is not below the run's {steps} steps: the rate never peaks"
    if examples.training_rows < config.train.batch_size:
        yield (
            f"train.batch_size: {config.train.batch_size} is above the {examples.training_rows} training examples; a batch "
            "then holds examples of several epochs"
        )
