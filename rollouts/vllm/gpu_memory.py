"""`sync.method: direct` between a trainer and an engine on one GPU: a version lies in the GPU's memory, which both see (CUDA IPC).

Everything but the handles' meaning is the same on a CPU, where torch shares memory through files without a disk: that is how it
is tested. It was not yet exercised on a GPU.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rollouts.vllm.weight_stream import Bucket, Placed, checksum, views


@dataclass
class DeviceUpdate:
    """What `orchestration.weight_transfer.gpu_publisher.DevicePublisher.publish` returns."""

    version: int
    gpu: str  # see `name_of`
    pieces: list[dict[str, Any]]  # handle, size_bytes, checksum, and tensors: where they lie, as `Placed`
    size_bytes: int  # of all pieces
    adapter: dict[str, Any] | None = None  # PEFT's configuration when the tensors are an adapter's


def name_of(device: torch.device) -> str:
    """The same in every process for one GPU, whose number is not: Ray shows each actor its own GPUs, counted from 0."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


def shared(data: Tensor) -> bytes:
    """A handle by which another process opens the tensor's memory; once for each, since torch counts how often it is opened.
    Whoever calls this keeps the tensor for as long as others may have it open."""
    return bytes(ForkingPickler.dumps(reduce_tensor(data)))


def opened(handle: bytes, device: torch.device) -> Tensor:
    """The same memory in this process. Raises RuntimeError: its owner is gone, or the driver does not allow it."""
    rebuild, arguments = pickle.loads(handle)  # from the trainer, as all that Ray brings
    if device.type == "cuda":
        arguments = (*arguments[:6], device.index, *arguments[7:])  # the owner's number of this GPU
    data: Tensor = rebuild(*arguments)
    return data


class DeviceVersion:
    """A version as a receiver sees it. Its memory stays open while this object lives, or a view; let go of both soon."""

    def __init__(self, update: DeviceUpdate, device: torch.device) -> None:
        """Raises ValueError: it is on another GPU, or cannot be opened."""
        if (here := name_of(device)) != update.gpu:
            raise ValueError(f"the weights are in the memory of GPU {update.gpu}, and this engine is on {here}")
        self.update = update
        try:
            self.data = [opened(piece["handle"], device)[: piece["size_bytes"]] for piece in update.pieces]
        except (OSError, RuntimeError) as error:
            raise ValueError(f"the trainer's memory on GPU {here} cannot be opened: {error}") from error

    def buckets(self) -> Iterator[Bucket]:
        """A bucket for every piece. What is made of them counts only if `check` finds nothing afterwards."""
        for data, piece in zip(self.data, self.update.pieces, strict=True):
            yield Bucket(views(data, [Placed(**row) for row in piece["tensors"]]), self.update.adapter)

    def check(self) -> None:
        """Called when all was copied out of the views. Raises ValueError: the bytes are not the ones that were sent."""
        for i, (data, piece) in enumerate(zip(self.data, self.update.pieces, strict=True)):
            if (found := checksum(data)) != piece["checksum"]:
                raise ValueError(
                    f"the bytes of piece {i} on GPU {self.update.gpu} are not those sent (checksum {found:x}, sent "
                    f"{piece['checksum']:x})"
                )
