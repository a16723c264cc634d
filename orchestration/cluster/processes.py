"""End processes for good, whatever their state, on any machine of the cluster."""

from __future__ import annotations

import contextlib
import os
import signal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

END_SECONDS = 60.0  # in which another machine must carry out the kill


def lead_own_group() -> None:
    """Make this process the leader of a process group, which its later children join.

    The group can be ended as a whole even when this process is dead or stopped. Ray does the same unless it is
    configured otherwise.
    """
    if os.getpgrp() != os.getpid():
        os.setpgrp()


def end_group(pid: int, node: str) -> None:
    """Kill a process and its children (see `lead_own_group`) on the machine with this Ray node id.

    Unlike Ray's own kill this ends a stopped process too. When the machine is gone, nothing is done.
    """
    if node == ray.get_runtime_context().get_node_id():
        _kill_group(pid)
        return
    if any(machine["NodeID"] == node and machine["Alive"] for machine in ray.nodes()):
        on_node = NodeAffinitySchedulingStrategy(node, soft=False)
        kill = ray.remote(num_cpus=0, max_retries=0)(_kill_group).options(scheduling_strategy=on_node).remote(pid)
        ray.wait([kill], timeout=END_SECONDS)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # the process and its children are gone already
        os.killpg(pid, signal.SIGKILL)
