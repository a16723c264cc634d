"""Weights that stay in the memory of a GPU which trainer and engine share. Without a GPU torch's handles are replaced
by a table and the GPU by the CPU's memory; publisher, vLLM's IPC receiver and the checks between them are the code that
runs on a GPU."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from orchestration.weight_transfer import gpu_publisher
from orchestration.weight_transfer.gpu_publisher import GpuPublisher
from rollouts.vllm.weight_broadcast import TransferFailed
from rollouts.vllm.weight_file import Checksum, Named
from rollouts.vllm.weight_receiver import GpuUpdate, WeightReceiver

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[int, torch.Tensor]:
    """The memory that handles open."""
    from vllm.distributed.weight_transfer import ipc_engine

    shared: dict[int, torch.Tensor] = {}

    def handle(tensor: torch.Tensor) -> tuple[Any, ...]:
        shared[len(shared)] = tensor
        return (len(shared) - 1, *range(1, 10))

    def opened(number: int, *others: Any) -> torch.Tensor:
        assert others[5] is CPU.index, "the receiver's number of the GPU, not the sender's"
        return shared[number]

    monkeypatch.setattr(gpu_publisher, "ipc_handle", handle)
    monkeypatch.setattr(ipc_engine, "rebuild_cuda_tensor", opened)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-1"))
    return shared


def taken(notice: dict[str, Any]) -> list[Named]:
    """What vLLM's receiver opens in a worker."""
    worker: Any = SimpleNamespace(
        config=None, device=CPU, vllm_config=SimpleNamespace(parallel_config=None, model_config=None)
    )
    return WeightReceiver._opened(worker, GpuUpdate(**notice))


def version(number: int, *sizes: int) -> list[Named]:
    generator = torch.Generator().manual_seed(number)
    made = [torch.randn(2, size, generator=generator) for size in sizes]
    return [(f"{i}", [one.T, one.bfloat16(), one[0]][i % 3]) for i, one in enumerate(made)]


def test_versions_come_bit_for_bit_through_memory_that_is_kept(gpu: dict[int, torch.Tensor]) -> None:
    publisher = GpuPublisher(CPU)
    for number, sizes in enumerate([(600, 0, 500, 7), (600, 0, 500, 7), (600, 0, 5000), (1,)]):
        notice = publisher.publish(number, version(number, *sizes))
        came = taken(notice)
        for (name, ours), (told, theirs) in zip(version(number, *sizes), came, strict=True):
            assert name == told and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        assert Checksum(came).value() == notice["checksum"]
        assert notice["size_bytes"] == sum(tensor.nbytes for _, tensor in came)
    assert gpu[0].data_ptr() == gpu[4].data_ptr() == gpu[8].data_ptr() != gpu[11].data_ptr()
    assert gpu[2].data_ptr() == gpu[6].data_ptr() != gpu[10].data_ptr()


def test_a_version_that_is_written_over_while_it_is_copied_has_another_checksum() -> None:
    publisher = GpuPublisher(CPU)
    notice = publisher.publish(1, version(1, 500, 500))
    came = taken(notice)
    publisher.publish(2, version(2, 500, 500))
    assert Checksum(came).value() != notice["checksum"]


def test_an_engine_on_another_gpu_refuses() -> None:
    notice = {**GpuPublisher(CPU).publish(1, version(1, 10)), "gpu": "GPU-2"}
    with pytest.raises(ValueError, match="IPC handle not found for GPU UUID GPU-1"):
        taken(notice)


def test_without_room_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(TransferFailed, match=r"no room for it; lower placement\.engine_memory_share, or use disk"):
        GpuPublisher(CPU).publish(1, version(1, 10))


def test_torch_numbers_the_device_where_vllm_puts_the_receivers_own() -> None:
    parameters = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert parameters[6] == "storage_device"
