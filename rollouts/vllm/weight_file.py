"""The receiving side of `sync.method` direct and disk: a version in one file, memory-mapped."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo

from rollouts.vllm.weight_stream import Placed, checksum, views


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """What `orchestration.weight_transfer.file_publisher.WeightPublisher.publish` returns: one file with all tensors, each at its offset."""

    version: int
    path: str
    tensors: list[dict[str, Any]]  # where in the file they lie, as `Placed`
    size_bytes: int  # of the whole version
    checksum: int  # of these bytes
    adapter: dict[str, Any] | None = None  # PEFT's configuration when the tensors are an adapter's


class WeightFile:
    """The file that versions come in. Shared memory stays mapped from one version to the next, which are written over one
    another: to make a mapping takes several times as long as to read it."""

    def __init__(self) -> None:
        self._data = torch.empty(0, dtype=torch.uint8)
        self._identity: tuple[int, int] | None = None

    def tensors(self, update: FileUpdate) -> list[tuple[str, Tensor]]:
        """Views into the file. What is made of them counts only if `check` finds nothing afterwards.

        Raises ValueError: the file cannot be mapped.
        """
        self._map(update)
        return views(self._data, (Placed(**row) for row in update.tensors))

    def check(self, update: FileUpdate) -> None:
        """Called when all was copied out of the views: whoever wrote to the file before, or meanwhile, is found out.

        Raises ValueError: the bytes are not the ones that were sent.
        """
        found = checksum(self._data)
        if found != update.checksum:
            self._identity = None
            raise ValueError(
                f"the bytes of {update.path} are not those sent (checksum {found:x}, sent {update.checksum:x})"
            )

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
                f"{update.path} cannot be mapped with {update.size_bytes} bytes ({error}); sync.method direct needs engines "
                "on the trainer's machine, disk a folder that both see"
            ) from error
