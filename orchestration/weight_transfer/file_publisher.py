"""The sending side of a weight sync: all tensors of a policy version in one file, for engines to memory-map."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
import xxhash
from torch import Tensor

from rollouts.vllm.weight_stream import Placed, aligned, bytes_of, checksum, digest


class WeightPublisher:
    """Writes policy versions for engines to read. Lives on trainer rank 0; one per run.

    `direct` writes to anonymous shared memory, which engines on the same machine open through /proc: no limit but the
    machine's memory, and nothing stays behind however the trainer ends. `disk` writes to `folder`, which engines on
    other machines must see under the same path. The bytes are streamed tensor by tensor, so that gathering a sharded
    model needs room for one tensor beside the file. There is one version at a time, or none: the next one is written over
    it, because memory that is there already is several times faster than memory that has to be made.
    """

    def __init__(self, method: Literal["direct", "disk"], folder: str | os.PathLike[str]) -> None:
        """folder: of `disk`; a version that a killed run left there is removed.

        Raises ValueError: `direct` on a system without anonymous shared memory.
        """
        self.method = method
        if method == "direct" and not hasattr(os, "memfd_create"):
            raise ValueError("sync.method: direct needs Linux (anonymous shared memory); use disk")
        self._place = _Memory() if method == "direct" else _File(Path(folder).absolute())

    def publish(
        self, version: int, named_tensors: Iterable[tuple[str, Tensor]], adapter: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Write a version and return the update that `VLLMEngine.load_weights` takes (plain values, small).

        named_tensors: full tensors of any shape under Hugging Face names, in the dtype the engine computes in, on any
        device; a weight that is tied to another one may be left out.
        adapter: the tensors are those of an adapter, under PEFT's names, and this its configuration.
        The version before is gone from here on: engines need it no more once their load returned, and one that is still
        reading it finds that its bytes have changed.
        """
        placed: list[Placed] = []
        size_bytes = 0
        self._place.begin()
        try:
            for name, tensor in named_tensors:
                data = bytes_of(tensor.detach())
                offset = aligned(size_bytes)
                self._place.put(offset, data)
                placed.append(Placed.of(name, tensor, offset))
                size_bytes = offset + len(data)
        finally:
            total = self._place.end(size_bytes)
        assert placed, "an update without tensors"
        return {
            "version": version,
            "path": self._place.path,
            "tensors": [asdict(one) for one in placed],
            "size_bytes": size_bytes,
            "checksum": total,
            "adapter": adapter,
        }

    def close(self) -> None:
        """Remove what was written."""
        self._place.close()


class _Memory:
    """Memory without a name, written through a mapping. It lives as long as it is open, or mapped, somewhere."""

    def __init__(self) -> None:
        self._open()

    def _open(self) -> None:
        self._descriptor: int | None = os.memfd_create("feynrl-weights")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self._mapped = torch.empty(0, dtype=torch.uint8)

    def begin(self) -> None:
        if self._descriptor is None:  # closed meanwhile
            self._open()

    def put(self, offset: int, data: Tensor) -> None:
        end = offset + len(data)
        if end > len(self._mapped):
            assert self._descriptor is not None
            os.ftruncate(self._descriptor, 2 * end)  # pages that are never touched take no memory
            self._mapped = torch.from_file(self.path, shared=True, size=2 * end, dtype=torch.uint8)
        self._mapped[offset:end].copy_(data)

    def end(self, size_bytes: int) -> int:
        return checksum(self._mapped[:size_bytes])

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
        self._size_bytes, self._sum = 0, xxhash.xxh3_64()

    def put(self, offset: int, data: Tensor) -> None:
        for part in (bytes(offset - self._size_bytes), data.cpu().numpy().data):
            self._file.write(part)
            self._sum.update(part)
        self._size_bytes = offset + len(data)

    def end(self, size_bytes: int) -> int:
        with self._file:
            self._file.truncate()  # the version before may have been longer
            self._file.flush()
            os.fsync(self._file.fileno())  # another machine may read it next
        return digest(self._sum)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
