"""The sending side of a weight sync: all tensors of a policy version in one file, for engines to memory-map."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor

from rollouts.vllm.weight_file import Checksum, TensorInfo, aligned, bytes_of


class WeightPublisher:
    """The writer of policy versions for engines, on trainer rank 0; one per run.

    `direct` writes to anonymous shared memory, which engines on the same machine open through /proc. Only the machine's
    memory limits it, and nothing is left however the trainer ends. `disk` writes to `folder`, which engines on other
    machines must see under the same path. Tensors are written one by one, so that gathering a sharded model needs room
    for one tensor beside the file. There is at most one version at a time: the next one is written over it, because
    writing to existing memory is several times faster than allocating new memory.
    """

    def __init__(self, method: Literal["direct", "disk"], folder: str | os.PathLike[str]) -> None:
        """Prepare the method. folder: where `disk` writes; a version that a killed run left there is removed.

        Raise ValueError when the method is `direct` and the system has no anonymous shared memory.
        """
        self.method = method
        if method == "direct" and not hasattr(os, "memfd_create"):
            raise ValueError("sync.method: direct needs Linux (anonymous shared memory); use disk")
        self._place = _Memory() if method == "direct" else _File(Path(folder).absolute())

    def publish(
        self, version: int, named_tensors: Iterable[tuple[str, Tensor]], adapter: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Write a version and return the update that `VLLMEngine.load_weights` takes (plain values, small).

        named_tensors: full tensors of any shape under Hugging Face names, in the dtype in which the engine computes, on
        any device; a weight that is tied to another one may be left out.
        adapter: PEFT's configuration when the tensors are those of an adapter, under PEFT's names.
        The version before is lost from now on. Engines do not need it once their load has returned, and one that is
        still reading it notices that its bytes have changed.
        """
        tensors: list[TensorInfo] = []
        size_bytes, checksum = 0, Checksum()
        self._place.begin()
        try:
            for name, tensor in named_tensors:
                data = bytes_of(tensor.detach())
                offset = aligned(size_bytes)
                checksum.add(self._place.put(offset, data))
                tensors.append(TensorInfo.of(name, tensor))
                size_bytes = offset + len(data)
        finally:
            self._place.end()
        assert tensors, "an update without tensors"
        return {
            "version": version,
            "path": self._place.path,
            "tensors": [asdict(tensor) for tensor in tensors],
            "size_bytes": size_bytes,
            "checksum": checksum.value(),
            "adapter": adapter,
        }

    def close(self) -> None:
        """Remove what was written."""
        self._place.close()


class _Memory:
    """Anonymous memory, written through a mapping. It lives as long as some process has it open or mapped."""

    def __init__(self) -> None:
        self._open()

    def _open(self) -> None:
        self._descriptor: int | None = os.memfd_create("feynrl-weights")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self._mapped = torch.empty(0, dtype=torch.uint8)

    def begin(self) -> None:
        if self._descriptor is None:  # closed meanwhile
            self._open()

    def put(self, offset: int, data: Tensor) -> Tensor:
        """Write bytes at this offset; return them as written."""
        end = offset + len(data)
        if end > len(self._mapped):
            assert self._descriptor is not None
            os.ftruncate(self._descriptor, 2 * end)  # pages that are never touched take no memory
            self._mapped = torch.from_file(self.path, shared=True, size=2 * end, dtype=torch.uint8)
        return self._mapped[offset:end].copy_(data)

    def end(self) -> None:
        pass

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._mapped = None, torch.empty(0, dtype=torch.uint8)


class _File:
    """A file that is opened for each version, so that others see it whole when it is closed."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "weights.bin"
        self.path = str(self._path)
        self.close()

    def begin(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = open(self.path, "r+b" if self._path.exists() else "wb")  # noqa: SIM115 (closed in `end`)
        self._size_bytes = 0

    def put(self, offset: int, data: Tensor) -> Tensor:
        """Write bytes at this offset; return them."""
        data = data.cpu()
        self._file.write(bytes(offset - self._size_bytes))
        self._file.write(data.numpy().data)
        self._size_bytes = offset + len(data)
        return data

    def end(self) -> None:
        with self._file:
            self._file.truncate()  # the version before may have been longer
            self._file.flush()
            os.fsync(self._file.fileno())  # another machine may read it next

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
