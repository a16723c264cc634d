"""Reinforcement learning of a language model: python main_rl.py --config configs/grpo.yaml (--help explains)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from configs.blocks.rl import RLConfig
from orchestration.start.command_line import main

if TYPE_CHECKING:
    from orchestration.run.directory import RunDirectory
    from orchestration.start.preflight import Checked


def run(config: RLConfig, checked: Checked, directory: RunDirectory) -> None:
    from eval.report import LiveReport, write_report  # late: --help, --dry-run and bad input need no Ray
    from orchestration.rl.loop import run_rl
    from orchestration.run.atomic_files import afterwards

    with afterwards(lambda: write_report(directory.path)):
        run_rl(config, checked.prompts, directory, LiveReport())


def report(path: Path) -> None:
    from eval.report import write_report

    write_report(path)


if __name__ == "__main__":
    sys.exit(main("main_rl.py", RLConfig, "configs/grpo.yaml", run, report=report))
