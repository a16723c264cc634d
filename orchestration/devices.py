"""The one place that decides what runs where: device, collective backend, attention implementation, threads."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

# Names under which orchestration/attention.py registers its functions.
BUCKETS = "feynrl_buckets"
FLEX = "feynrl_flex"


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


def must_share(ranks: int, engines: int, devices_per_engine: int, gpus: int) -> bool:
    """Whether each GPU has to hold one trainer rank and one engine, since there are too few for one each.

    Raises:
        ValueError: sharing would not do either.
    """
    wanted = ranks + engines * devices_per_engine
    if wanted <= gpus:
        return False
    if devices_per_engine == 1 and max(ranks, engines) <= gpus:
        return True
    raise ValueError(
        f"train.ranks {ranks} and {engines} engines x {devices_per_engine} devices need {wanted} GPUs, or "
        f"{max(ranks, engines)} shared by a rank and an engine each where tensor_parallel_size is 1; there are {gpus}"
    )


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
    """A port on this machine that nobody listens on, for a rendezvous of trainer ranks."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
