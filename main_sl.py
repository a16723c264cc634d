"""Supervised and preference learning of a language model: python main_sl.py --config configs/sft.yaml (--help).

One process, or one per rank: torchrun --nproc_per_node 2 main_sl.py --config configs/sft.yaml, or deepspeed
--num_gpus 2 main_sl.py --config configs/sft.yaml.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

# Before torch is imported: threads that sleep while they wait, and no more of them than this rank's share of the cores.
# torchrun tells how many ranks this machine has as LOCAL_WORLD_SIZE, deepspeed as LOCAL_SIZE.
_RANKS = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1")
_CORES = len(os.sched_getaffinity(0)) // _RANKS
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _CORES)))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from configs.blocks.supervised import SLConfig
from orchestration.start.command_line import main
from orchestration.start.job_kind import JobKind, Training
from orchestration.start.load_data import load_examples, supervised_steps
from orchestration.start.plan_sl import plan_sl
from orchestration.start.preflight_sl import data_warnings_of_sl, preflight_sl

if TYPE_CHECKING:
    from data_feeds.examples.supervised_data import SupervisedData
    from orchestration.run.directory import RunDirectory


def run(config: SLConfig, examples: SupervisedData, directory: RunDirectory) -> None:
    from eval.report import LiveReport, write_report  # late: --help, --dry-run and bad input need no DeepSpeed
    from orchestration.cluster.launcher_rank import is_first_rank
    from orchestration.run.atomic_files import afterwards
    from orchestration.supervised.loop import run_sl

    with afterwards(lambda: write_report(directory.path)) if is_first_rank() else nullcontext():
        run_sl(config, examples, directory, LiveReport())


def report(path: Path) -> None:
    from eval.report import write_report

    write_report(path)


SL = JobKind(
    program="main_sl.py",
    schema=SLConfig,
    example="configs/sft.yaml",
    load_data=load_examples,
    preflight=preflight_sl,
    data_warnings=data_warnings_of_sl,
    plan=plan_sl,
    run=run,
    training=Training(
        from_rewards=False,
        has_launcher=True,
        ranks=lambda _: int(os.environ.get("WORLD_SIZE", "1")),
        steps=supervised_steps,
        report=report,
    ),
)


def command() -> int:
    """Run the command line; return the exit code."""
    return main(SL)


if __name__ == "__main__":
    sys.exit(command())
