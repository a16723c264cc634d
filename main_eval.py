"""Evaluation of a model or checkpoint on its own: python main_eval.py --config configs/eval.yaml (--help explains)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from configs.blocks.rl import EvalConfig
from orchestration.start.command_line import main

if TYPE_CHECKING:
    from orchestration.run.directory import RunDirectory
    from orchestration.start.preflight import Checked


def run(config: EvalConfig, checked: Checked, directory: RunDirectory) -> None:
    from eval.evaluate import run_eval  # late: --help, --dry-run and bad input need no Ray
    from eval.report import write_report

    run_eval(config, checked.prompts, directory, write_report)


if __name__ == "__main__":
    sys.exit(main("main_eval.py", EvalConfig, "configs/eval.yaml", run))
