"""What trainer ranks are started with. DeepSpeed itself is asked, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from orchestration.cluster.devices import environment_for_trainer, free_port
from orchestration.cluster.watchdog import START_SECONDS
from orchestration.trainer.ranks import collective_minutes

TELL = """
import deepspeed, psutil, torch
from orchestration.cluster.loopback import init_method
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as the trainer, which needs no compiler
deepspeed.init_distributed(dist_backend="gloo", verbose=False, init_method=init_method())
print(*{c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN})
group = torch.distributed.distributed_c10d._get_default_group()
print(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
"""


@pytest.mark.parametrize("stall_seconds", [5.0, 600.0, 7250.0])
def test_ranks_wait_longer_for_one_another_than_the_watchdog_does(stall_seconds: float) -> None:
    seconds = 60 * collective_minutes(stall_seconds)
    assert seconds >= max(stall_seconds, START_SECONDS) + 60
    assert seconds < max(stall_seconds, START_SECONDS) + 120


def test_deepspeed_takes_the_time_out_from_the_environment_and_ranks_meet_on_loopback() -> None:
    alone = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    environment = {**os.environ, **environment_for_trainer("cpu", 1), **alone, "DEEPSPEED_TIMEOUT": "123"}
    done = subprocess.run(
        [sys.executable, "-c", TELL], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    *_, addresses, seconds = done.stdout.splitlines()
    assert float(seconds) == 123 * 60
    assert addresses == "127.0.0.1", "torch's own store listens on every interface"
