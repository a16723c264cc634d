"""Which rank this process is, when torchrun, deepspeed or nobody started it."""

from __future__ import annotations

import os

from orchestration.cluster.devices import free_port


def is_first_rank() -> bool:
    """Whether this process speaks for all: it alone prints, makes the run directory and writes into it."""
    return os.environ.get("RANK", "0") == "0"


def join_ranks() -> tuple[int, int]:
    """This process's rank and the number of ranks. A process that no launcher started becomes the only one."""
    if "RANK" not in os.environ:
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
        )
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
