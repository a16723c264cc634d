"""Evaluation of a model or checkpoint on its own: python main_eval.py --config configs/eval.yaml (--help explains)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from configs.blocks.evaluation import EvalConfig
from orchestration.start.command_line import main
from orchestration.start.job_kind import JobKind
from orchestration.start.load_data import load_prompt_sets
from orchestration.start.plan_engines import plan_eval
from orchestration.start.preflight import data_warnings_of_eval, preflight_eval, tried_rewards

if TYPE_CHECKING:
    from data_feeds.prompts.prompts import PromptSets
    from orchestration.run.directory import RunDirectory


def run(config: EvalConfig, prompts: PromptSets, directory: RunDirectory) -> None:
    from eval.evaluate import run_eval  # late: --help, --dry-run and bad input need no Ray
    from eval.report import write_report

    run_eval(config, prompts, directory, write_report)


EVAL = JobKind(
    program="main_eval.py",
    schema=EvalConfig,
    example="configs/eval.yaml",
    load_data=load_prompt_sets,
    preflight=preflight_eval,
    data_warnings=data_warnings_of_eval,
    plan=plan_eval,
    run=run,
    tried=tried_rewards,
)


def command() -> int:
    """Run the command line; return the exit code."""
    return main(EVAL)


if __name__ == "__main__":
    sys.exit(command())
