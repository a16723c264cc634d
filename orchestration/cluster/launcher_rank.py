"""Find out which rank this process is, whether torchrun, deepspeed or no launcher started it."""

from __future__ import annotations

import os

from orchestration.cluster.devices import free_port


def is_first_rank() -> bool:
    """Return whether this is the process that prints, makes the run directory and writes into it."""
    return os.environ.get("RANK", "0") == "0"


def join_ranks() -> tuple[int, int]:
    """Return this process's rank and the number of ranks. A process without a launcher becomes the only rank."""
    if "RANK" not in os.environ:
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
        )
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
