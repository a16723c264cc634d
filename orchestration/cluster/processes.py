"""Ending processes for good, whatever state they are in, on whatever machine."""

from __future__ import annotations

import contextlib
import os
import signal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

END_SECONDS = 60.0  # for a machine to take the order


def lead_own_group() -> None:
    """Make this process and all children that it will have a process group, so that they can be ended together even when
    it is dead or stopped. Ray does so by default, but can be told otherwise."""
    if os.getpgrp() != os.getpid():
        os.setpgrp()


def end_group(pid: int, node: str) -> None:
    """Kill a process and its children (see `lead_own_group`) on the machine with this Ray node id. Unlike Ray's own kill it
    needs no cooperation: a stopped process goes too. On a machine that is gone there is nothing to do."""
    if node == ray.get_runtime_context().get_node_id():
        _kill(pid)
        return
    if any(one["NodeID"] == node and one["Alive"] for one in ray.nodes()):
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        order = ray.remote(num_cpus=0, max_retries=0)(_kill).options(scheduling_strategy=there).remote(pid)
        ray.wait([order], timeout=END_SECONDS)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it is gone already, and its children too
        os.killpg(pid, signal.SIGKILL)
