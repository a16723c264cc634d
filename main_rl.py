"""Reinforcement learning of a language model: python main_rl.py --config configs/grpo.yaml (--help explains)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from configs.blocks.rl import RLConfig
from orchestration.start.command_line import main
from orchestration.start.job_kind import JobKind, Training
from orchestration.start.load_data import load_prompt_sets
from orchestration.start.plan_rl import plan_rl
from orchestration.start.preflight import data_warnings_of_rl, preflight_rl, tried_rewards

if TYPE_CHECKING:
    from data_feeds.prompts.prompts import PromptSets
    from orchestration.run.directory import RunDirectory


def run(config: RLConfig, prompts: PromptSets, directory: RunDirectory) -> None:
    from eval.report import LiveReport, write_report  # late: --help, --dry-run and bad input need no Ray
    from orchestration.rl.loop import run_rl
    from orchestration.run.atomic_files import afterwards

    with afterwards(lambda: write_report(directory.path)):
        run_rl(config, prompts, directory, LiveReport())


def report(path: Path) -> None:
    from eval.report import write_report

    write_report(path)


RL = JobKind(
    program="main_rl.py",
    schema=RLConfig,
    example="configs/grpo.yaml",
    load_data=load_prompt_sets,
    preflight=preflight_rl,
    data_warnings=data_warnings_of_rl,
    plan=plan_rl,
    run=run,
    tried=tried_rewards,
    training=Training(
        from_rewards=True,
        has_launcher=False,
        ranks=lambda config: config.train.ranks,
        steps=lambda config, _: config.train.steps,
        report=report,
    ),
)


def command() -> int:
    """Run the command line; return the exit code."""
    return main(RL)


if __name__ == "__main__":
    sys.exit(command())
