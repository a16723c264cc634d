"""The rules of every kind of job, behind one function for problems and one for warnings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from configs.blocks.block import Block
from configs.blocks.evaluation import EvalConfig
from configs.blocks.rl import RLConfig
from configs.blocks.supervised import SLConfig
from configs.rules.evaluation import eval_problems, reward_warnings
from configs.rules.problem import Problem
from configs.rules.rl import rl_problems, rl_warnings
from configs.rules.supervised import sl_problems, sl_warnings

PROBLEMS: dict[type[Block], Callable[[Any], Iterator[Problem]]] = {
    RLConfig: rl_problems, SLConfig: sl_problems, EvalConfig: eval_problems,
}  # fmt: skip
WARNINGS: dict[type[Block], Callable[[Any], Iterator[str]]] = {
    RLConfig: rl_warnings, SLConfig: sl_warnings, EvalConfig: lambda config: reward_warnings(config.reward),
}  # fmt: skip


def problems_of(config: Block) -> list[Problem]:
    """Return why a configuration is refused, each as (dotted key, message with the remedy)."""
    return list(PROBLEMS[type(config)](config))


def warnings_for(config: Block) -> list[str]:
    """Return what the user should know about a valid configuration, one sentence each, beginning with the key."""
    return list(WARNINGS[type(config)](config))
