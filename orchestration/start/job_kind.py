"""The facts about each kind of job that the command line needs. main_rl.py, main_sl.py and main_eval.py each describe
their kind; no other code asks of which kind a configuration is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from configs.blocks.evaluation import EvalConfig
from configs.blocks.rl import RLConfig
from configs.blocks.supervised import SLConfig

if TYPE_CHECKING:
    from orchestration.model.checkpoint_facts import ModelFacts
    from orchestration.run.directory import RunDirectory
    from orchestration.start.plan import Plan
    from orchestration.start.preflight import Checked
    from orchestration.start.problems import Problems

TrainingConfig = RLConfig | SLConfig
AnyConfig = RLConfig | SLConfig | EvalConfig
Config = TypeVar("Config", bound=AnyConfig)
Data = TypeVar("Data")


@dataclass(frozen=True)
class Training(Generic[Config, Data]):
    """The facts about jobs that train: the methods to choose from, and how runs are resumed."""

    from_rewards: bool  # its methods learn from rewards; otherwise from examples
    has_launcher: bool  # torchrun or deepspeed starts its ranks
    ranks: Callable[[Config], int]
    steps: Callable[[Config, Data], int]
    report: Callable[[Path], None]  # writes the report of a run that was killed after its last step


@dataclass(frozen=True)
class JobKind(Generic[Config, Data]):
    """One kind of job: what it reads, how it is checked and shown, and how it is run."""

    program: str  # the script's name
    schema: type[Config]
    example: str  # the YAML file to show in examples
    load_data: Callable[[Config], Data]
    preflight: Callable[[Config, ModelFacts | None, bool, Problems], Checked | None]
    data_warnings: Callable[[Config, Data], Iterable[str]]
    plan: Callable[[Config, Checked, Data], Plan]
    run: Callable[[Config, Data, RunDirectory], None]
    tried: Callable[[Config, Data], Iterable[str]] = lambda config, data: ()  # what only a dry run tries; its warnings
    training: Training[Config, Data] | None = None
