from __future__ import annotations

import os
import socket

import pytest
import torch

from configs.blocks.placement import Placement
from orchestration.cluster.devices import (
    BUCKETS,
    FLEX,
    environment_for_trainer,
    free_port,
    resolve,
    shared_engine,
    shares_gpus,
)


def test_cpu() -> None:
    spec = resolve("cpu")
    assert (spec.device, spec.backend, spec.attention) == ("cpu", "gloo", BUCKETS)
    assert spec.cores == len(os.sched_getaffinity(0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_auto_without_a_gpu() -> None:
    assert resolve("auto") == resolve("cpu")
    with pytest.raises(ValueError, match="no CUDA device"):
        resolve("cuda")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_auto_with_a_gpu() -> None:
    assert (resolve("auto").device, resolve("auto").backend, resolve("auto").attention) == ("cuda", "nccl", FLEX)


def test_an_unknown_device_is_refused() -> None:
    assert resolve("cpu").attention == BUCKETS
    with pytest.raises(ValueError, match="auto, cpu, cuda"):
        resolve("tpu")


def test_trainer_environment() -> None:
    environment = environment_for_trainer("cpu", 2)
    assert environment["DS_ACCELERATOR"] == "cpu"
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize(
    ("ranks", "engines", "per_engine", "gpus", "colocate", "shared"),
    [
        (1, 1, 1, 2, None, False),
        (1, 1, 1, 1, None, True),
        (1, 1, 1, 2, True, True),
        (2, 2, 1, 3, None, True),
        (2, 1, 2, 4, False, False),
        (0, 2, 2, 4, None, False),
    ],
)
def test_who_shares_gpus(
    ranks: int, engines: int, per_engine: int, gpus: int, colocate: bool | None, shared: bool
) -> None:
    assert shares_gpus(ranks, engines, per_engine, gpus, colocate) is shared


@pytest.mark.parametrize(
    ("ranks", "engines", "per_engine", "gpus", "colocate", "why"),
    [
        (1, 1, 1, 1, False, "2 GPUs of their own.*pause_while_training"),
        (1, 1, 2, 2, None, "tensor_parallel_size is 1"),
        (1, 1, 2, 8, True, "tensor_parallel_size is 1"),
        (3, 1, 1, 2, None, "there are 2"),
    ],
)
def test_gpus_that_do_not_do(
    ranks: int, engines: int, per_engine: int, gpus: int, colocate: bool | None, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        shares_gpus(ranks, engines, per_engine, gpus, colocate)


def test_an_engine_that_shares_its_gpu() -> None:
    assert shared_engine(Placement(), {}) == {"enable_sleep_mode": True, "gpu_memory_utilization": 0.5}
    assert shared_engine(Placement(engine_memory_share=0.3), {"swap_space": 0})["gpu_memory_utilization"] == 0.3
    assert shared_engine(Placement(), {"gpu_memory_utilization": 0.2})["gpu_memory_utilization"] == 0.2


def test_a_free_port_stays_free_for_the_one_who_asked() -> None:
    """Nobody else can have it, torch's store can listen on it."""
    port = free_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    assert port not in {free_port() for _ in range(50)}
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    store.set("key", "value")
    assert store.port == port
    client = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    assert client.get("key") == b"value"
