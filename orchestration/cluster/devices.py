"""Decide what runs where: device, collective backend, attention function, environment of a trainer process."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

from configs.blocks.placement import Placement

# orchestration/model/packed_attention.py registers its functions under these names.
BUCKETS = "feynrl_buckets"
FLEX = "feynrl_flex"
ENGINE_MEMORY_SHARE = 0.5  # the engine's part of a GPU that it shares with a trainer rank
HELD_PORTS: list[socket.socket] = []  # they stay bound for the life of this process


@dataclass(frozen=True)
class DeviceSpec:
    """The devices of this machine, and the backend and attention function that follow from them."""

    device: str  # "cpu" or "cuda"
    backend: str  # collectives between trainer ranks: "gloo" or "nccl"
    attention: str  # name of the attention function for packed sequences
    cores: int  # CPU cores this process may use
    gpus: int


def resolve(device: str = "auto") -> DeviceSpec:
    """Turn the configured device ("auto", "cpu", "cuda") into what to use on this machine.

    Raises:
        ValueError: `device` is none of these names, or "cuda" is asked for and there is no GPU.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"model.device '{device}' is not one of auto, cpu, cuda")
    import torch  # late: the environment of `environment_for_trainer` must be set before torch is imported

    gpus = torch.cuda.device_count()
    if device == "cuda" and not gpus and "RAY_ADDRESS" not in os.environ:  # a cluster's GPUs may be on other machines
        raise ValueError("model.device is cuda, but this machine has no CUDA device; use cpu or auto")
    cores = len(os.sched_getaffinity(0))
    if device == "cpu" or (device == "auto" and not gpus):
        return DeviceSpec("cpu", "gloo", BUCKETS, cores, gpus)
    return DeviceSpec("cuda", "nccl", FLEX, cores, gpus)


def shares_gpus(ranks: int, engines: int, devices_per_engine: int, gpus: int, colocate: bool | None = None) -> bool:
    """Return whether rank i and engine i share GPU i and work in turn.

    With `colocate` true they share, with false they do not, and with None they share when there are too few GPUs for
    one each.

    Raises:
        ValueError: there are too few GPUs, or an engine of several devices would have to share.
    """
    wanted, shared = ranks + engines * devices_per_engine, max(ranks, engines)
    if not colocate and wanted <= gpus:
        return False
    if colocate is not False and devices_per_engine == 1 and shared <= gpus:
        return True
    if colocate is False:
        raise ValueError(
            f"train.ranks {ranks} and {engines} engines x {devices_per_engine} devices need {wanted} GPUs of their own "
            "because trainer and engines work at the same time or placement.colocate is false; there are "
            f"{gpus}. To let them share GPUs, leave placement.colocate empty and set schedule.pause_while_training "
            "(or schedule.mode sync)"
        )
    raise ValueError(
        f"train.ranks {ranks} and {engines} engines x {devices_per_engine} devices need {wanted} GPUs, or {shared} if "
        f"a rank and an engine share each, where tensor_parallel_size is 1; there are {gpus}"
    )


def shared_engine(placement: Placement, engine: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's arguments for an engine that can sleep and leaves memory to the trainer rank on its GPU.

    The arguments in `engine` win.
    """
    share = placement.engine_memory_share or ENGINE_MEMORY_SHARE
    return {"enable_sleep_mode": True, "gpu_memory_utilization": share, **engine}


def environment_for_trainer(device: str, threads: int) -> dict[str, str]:
    """Return the environment of a trainer process. Set it before torch and deepspeed are imported there.

    OpenMP threads sleep while they wait, because threads that spin on shared cores make a step about eight times
    slower.
    """
    assert threads >= 1, "a process has at least one thread"
    return {
        "DS_ACCELERATOR": device,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }


def free_port() -> int:
    """Return a port of this machine that no other process gets while this one lives.

    The port stays bound here without listening, so the kernel gives it neither to a process that wants any free port
    nor to an outgoing connection. A listener that allows address reuse, as torch's stores do, can still take it.
    """
    holder = socket.socket()
    holder.bind(("", 0))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after binding, which refuses a port that is in use
    HELD_PORTS.append(holder)
    return int(holder.getsockname()[1])
