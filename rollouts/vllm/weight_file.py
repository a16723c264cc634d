"""A version of the weights in one file, memory-mapped: `sync.method` disk, and direct with a file in shared memory.

It also holds what every method shares: the description of a tensor, the order of its bytes, and the checksum.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

Named = tuple[str, Tensor]

ALIGNMENT_BYTES = 64
ROW_WORDS = 1024


@dataclass(frozen=True)
class TensorInfo:
    """What a receiver learns of a tensor before it comes."""

    name: str
    dtype: str  # torch's name without "torch."
    shape: list[int]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorInfo:
        return cls(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))

    @property
    def kind(self) -> tuple[list[int], torch.dtype]:
        """Return shape and dtype."""
        return self.shape, getattr(torch, self.dtype)

    @property
    def size_bytes(self) -> int:
        shape, dtype = self.kind
        return torch.Size(shape).numel() * dtype.itemsize


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes, uint8 [N], on the same device; a view when that is possible."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def aligned(offset_bytes: int) -> int:
    """Return where in a file the next tensor begins."""
    return -(-offset_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def views(data: Tensor, tensors: Iterable[TensorInfo]) -> list[Named]:
    """Return the tensors that lie in these bytes (uint8 [N]) in this order, each at the next aligned place."""
    named, end = [], 0
    for tensor in tensors:
        begin = aligned(end)
        end = begin + tensor.size_bytes
        shape, dtype = tensor.kind
        named.append((tensor.name, data[begin:end].view(dtype).view(shape)))
    return named


class Checksum:
    """The checksum of a version: of the bytes of its tensors, in the order in which they are sent.

    Both ends of a transfer are on the same kind of device, and so compute the same one: xxh3 on a CPU, weighted sums of
    64-bit words elsewhere, at the speed of memory.
    """

    def __init__(self, tensors: Iterable[Named] = ()) -> None:
        self._hashed, self._sums = xxhash.xxh3_64(), list[Tensor]()
        for _, tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        data = bytes_of(tensor)
        if data.device.type == "cpu":
            self._hashed.update(data.numpy().data)
        else:
            self._sums.append(weighted_sum(data))  # fetched in `value`: other work on the device goes on

    def value(self) -> int:
        """Return the checksum as a signed 64-bit number."""
        if self._sums:
            return int(_weighted(torch.stack(self._sums)))
        return int.from_bytes(self._hashed.digest(), "big", signed=True)


def weighted_sum(data: Tensor) -> Tensor:
    """Return a checksum of bytes, as int64: two weighted sums of 64-bit words, similar to Fletcher's. The weight of a
    word is odd and depends on its place, so a change of any one word is always noticed."""
    if len(data) % 8 or data.storage_offset() % 8:
        data = torch.nn.functional.pad(data, (0, -len(data) % 8))
    words = data.view(torch.int64)
    whole = len(words) // ROW_WORDS * ROW_WORDS
    rows = words[:whole].view(-1, ROW_WORDS)
    return _weighted(rows.sum(0)) + 2 * _weighted(rows.sum(1)) + _weighted(words[whole:])


def _weighted(words: Tensor) -> Tensor:
    return (words * (2 * torch.arange(len(words), device=words.device) + 1)).sum()


def refuse_other_bytes(where: str, came: int, sent: int) -> None:
    """Compare two checksums. Raise ValueError when they differ."""
    if came != sent:
        raise ValueError(f"the bytes {where} are not those sent (checksum {came:x}, sent {sent:x})")


@dataclass
class FileUpdate:
    """What `orchestration.weight_transfer.file_publisher.WeightPublisher.publish` returns."""

    version: int
    path: str
    tensors: list[dict[str, Any]]  # `TensorInfo` of each, in the order they lie in
    size_bytes: int  # of the whole file
    checksum: int
    adapter: dict[str, Any] | None = None  # PEFT's configuration when the tensors are an adapter's


class WeightFile:
    """The file that versions come in. Shared memory stays mapped while one version after the other is written over it,
    because making a mapping takes several times as long as reading it."""

    def __init__(self) -> None:
        self._data = torch.empty(0, dtype=torch.uint8)
        self._identity: tuple[int, int] | None = None

    def tensors(self, update: FileUpdate) -> list[Named]:
        """Return views into the file. Compare their checksum after use: if it is right, nobody has written to the file.

        Raise ValueError when the file cannot be mapped.
        """
        self._map(update)
        return views(self._data, (TensorInfo(**row) for row in update.tensors))

    def _map(self, update: FileUpdate) -> None:
        try:
            status = os.stat(update.path)
            identity = (status.st_dev, status.st_ino) if update.path.startswith("/proc/") else None
            if identity is None or identity != self._identity or len(self._data) != update.size_bytes:
                self._identity = None
                self._data = torch.from_file(update.path, shared=False, size=update.size_bytes, dtype=torch.uint8)
                self._identity = identity
        except (OSError, RuntimeError) as error:
            raise ValueError(
                f"{update.path} cannot be mapped with {update.size_bytes} bytes ({error}); sync.method direct needs "
                "engines on the trainer's machine, disk a folder that both see"
            ) from error
