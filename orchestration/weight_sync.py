"""The sending side of a weight sync: all tensors of a policy version in one file, for engines to memory-map."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor

ALIGNMENT_BYTES = 64


class WeightPublisher:
    """Writes policy versions for engines to read. Lives on trainer rank 0; one per run.

    `direct` writes to anonymous shared memory, which engines on the same machine open through /proc: no limit but the
    machine's memory, and nothing stays behind however the trainer ends. `disk` writes to `folder`, which engines on
    other machines must see under the same path. The bytes are streamed tensor by tensor, so that gathering a sharded
    model needs room for one tensor beside the file. There is one version at a time, or none.
    """

    def __init__(self, method: Literal["direct", "disk"], folder: str | os.PathLike[str]) -> None:
        """folder: of `disk`; versions that a killed run left there are removed.

        Raises ValueError: `direct` on a system without anonymous shared memory.
        """
        self.method = method
        self.folder = Path(folder).absolute()
        self._shared: BinaryIO | None = None
        if method == "direct" and not hasattr(os, "memfd_create"):
            raise ValueError("sync.method: direct needs Linux (anonymous shared memory); use disk")
        self._forget()

    def publish(
        self, version: int, named_tensors: Iterable[tuple[str, Tensor]], adapter: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Write a version and return the update that `VLLMEngine.load_weights` takes (plain values, small).

        named_tensors: full tensors of any shape under Hugging Face names, in the dtype the engine computes in, on any
        device; a weight that is tied to another one may be left out.
        adapter: the tensors are those of an adapter, under PEFT's names, and this its configuration.
        The previous version is removed first: engines
        need it no more once their load returned.
        """
        self._forget()
        names: list[str] = []
        dtypes: list[str] = []
        shapes: list[list[int]] = []
        offsets: list[int] = []
        size_bytes = checksum = 0
        path, file = self._open(version)
        try:
            for name, tensor in named_tensors:
                data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
                padding = bytes(-size_bytes % ALIGNMENT_BYTES)
                names.append(name)
                dtypes.append(str(tensor.dtype).removeprefix("torch."))
                shapes.append(list(tensor.shape))
                offsets.append(size_bytes + len(padding))
                file.write(padding)
                file.write(data)
                checksum = zlib.crc32(data, zlib.crc32(padding, checksum))
                size_bytes += len(padding) + data.nbytes
            file.flush()
            if self.method == "disk":
                os.fsync(file.fileno())  # another machine may read it next
        finally:
            if self.method == "disk":
                file.close()
        assert names, "an update without tensors"
        return {
            "version": version,
            "path": path,
            "names": names,
            "dtypes": dtypes,
            "shapes": shapes,
            "offsets": offsets,
            "size_bytes": size_bytes,
            "crc32": checksum,
            "adapter": adapter,
        }

    def close(self) -> None:
        """Remove what was written."""
        self._forget()

    def _open(self, version: int) -> tuple[str, BinaryIO]:
        if self.method == "direct":
            descriptor = os.memfd_create(f"feynrl-weights-{version}")
            self._shared = os.fdopen(descriptor, "wb")  # the memory lives as long as this is open, or mapped
            return f"/proc/{os.getpid()}/fd/{descriptor}", self._shared
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"version_{version:06d}.bin"
        return str(path), path.open("wb")

    def _forget(self) -> None:
        if self._shared is not None:
            self._shared.close()
            self._shared = None
        if self.method == "disk":
            for path in self.folder.glob("version_*.bin"):
                path.unlink()
