"""Supervised and preference learning of a language model: python main_sl.py --config configs/sft.yaml (--help explains).

One process, or one per rank: torchrun --nproc_per_node 2 main_sl.py --config configs/sft.yaml, or deepspeed --num_gpus 2
main_sl.py --config configs/sft.yaml.
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

if TYPE_CHECKING:
    from orchestration.run.directory import RunDirectory
    from orchestration.start.preflight_sl import SLChecked


def run(config: SLConfig, checked: SLChecked, directory: RunDirectory) -> None:
    from eval.report import LiveReport, write_report  # late: --help, --dry-run and bad input need no DeepSpeed
    from orchestration.cluster.launcher_rank import is_first_rank
    from orchestration.run.atomic_files import afterwards
    from orchestration.supervised.loop import run_sl

    with afterwards(lambda: write_report(directory.path)) if is_first_rank() else nullcontext():
        run_sl(config, checked, directory, LiveReport())


def report(path: Path) -> None:
    from eval.report import write_report

    write_report(path)


if __name__ == "__main__":
    sys.exit(main("main_sl.py", SLConfig, "configs/sft.yaml", run, report=report))
