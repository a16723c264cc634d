"""The one place that decides what runs where: device, collective backend, attention implementation, threads."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

from configs.blocks.placement import Placement

# Names under which orchestration/model/packed_attention.py registers its functions.
BUCKETS = "feynrl_buckets"
FLEX = "feynrl_flex"
ENGINE_MEMORY_SHARE = 0.5  # of a GPU that an engine shares with a trainer rank
HELD_PORTS: list[socket.socket] = []  # for the life of this process


@dataclass(frozen=True)
class DeviceSpec:
    """What this machine offers and what follows from it."""

    device: str  # "cpu" or "cuda"
    backend: str  # collectives between trainer ranks: "gloo" or "nccl"
    attention: str  # name of the attention function for packed sequences
    cores: int  # CPU cores this process may use
    gpus: int


def resolve(device: str = "auto", attention: str | None = None) -> DeviceSpec:
    """Turn the configured device ("auto", "cpu", "cuda") into what to use on this machine.

    `attention` overrides the device's own choice: feynrl_flex (compiled, CUDA) or feynrl_buckets (everywhere).

    Raises:
        ValueError: "cuda" on a machine without a GPU, or a name that is none of the above.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"model.device '{device}' is not one of auto, cpu, cuda")
    if attention not in (None, BUCKETS, FLEX):
        raise ValueError(f"attention '{attention}' is not one of {BUCKETS}, {FLEX}")
    import torch  # late: the environment below has to be set before torch is imported

    gpus = torch.cuda.device_count()
    if device == "cuda" and not gpus and "RAY_ADDRESS" not in os.environ:  # a cluster's GPUs may be on other machines
        raise ValueError("model.device is cuda, but this machine has no CUDA device; use cpu or auto")
    cores = len(os.sched_getaffinity(0))
    if device == "cpu" or (device == "auto" and not gpus):
        return DeviceSpec("cpu", "gloo", attention or BUCKETS, cores, gpus)
    return DeviceSpec("cuda", "nccl", attention or FLEX, cores, gpus)


def shares_gpus(ranks: int, engines: int, devices_per_engine: int, gpus: int, colocate: bool | None = None) -> bool:
    """Whether rank i and engine i are on one GPU, in turn: always (colocate true), never (false), or when there are too few
    for one each (None).

    Raises:
        ValueError: the GPUs do not do, or an engine of several devices would have to share.
    """
    wanted, shared = ranks + engines * devices_per_engine, max(ranks, engines)
    if not colocate and wanted <= gpus:
        return False
    if colocate is not False and devices_per_engine == 1 and shared <= gpus:
        return True
    if colocate is False:
        raise ValueError(
            f"train.ranks {ranks} and {engines} engines x {devices_per_engine} devices need {wanted} GPUs of their own, since "
            "trainer and engines work at the same time or placement.colocate is false; there are "
            f"{gpus}. With schedule.pause_while_training (or schedule.mode sync) and placement.colocate empty they share"
        )
    raise ValueError(
        f"train.ranks {ranks} and {engines} engines x {devices_per_engine} devices need {wanted} GPUs, or "
        f"{shared} shared by a rank and an engine each where tensor_parallel_size is 1; there are {gpus}"
    )


def shared_engine(placement: Placement, engine: dict[str, Any]) -> dict[str, Any]:
    """vLLM's arguments of an engine that shares its GPU with a trainer rank: it can sleep, and leaves memory to the rank."""
    share = placement.engine_memory_share or ENGINE_MEMORY_SHARE
    return {"enable_sleep_mode": True, "gpu_memory_utilization": share, **engine}


def environment_for_trainer(device: str, threads: int) -> dict[str, str]:
    """Environment of a trainer process; to be set before torch and deepspeed are imported there.

    OpenMP threads sleep while they wait: spinning teams on shared cores slow a step down about eightfold.
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
    """A port of this machine that nobody else gets while this process lives, for a listener that allows address reuse, as
    those of torch's stores do.

    The port stays bound, without listening: the kernel gives it to no other, neither to one who asks for any free port nor
    to an outgoing connection. A port that was only probed could be taken before its user listens, seconds later.
    """
    holder = socket.socket()
    holder.bind(("", 0))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after binding, so that the port was nobody's
    HELD_PORTS.append(holder)
    return int(holder.getsockname()[1])
