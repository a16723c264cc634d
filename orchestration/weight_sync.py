"""The sending side of a weight sync: all tensors of a policy version in one file, for engines to memory-map."""

from __future__ import annotations

import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

ALIGNMENT_BYTES = 64
SHARED_MEMORY = Path("/dev/shm")


class WeightPublisher:
    """Writes policy versions for engines to read. Lives on trainer rank 0; one per run.

    `direct` writes to shared memory: trainer and engines are on one machine. `disk` writes to `folder`, which engines
    on other machines must see under the same path. The bytes are streamed tensor by tensor, so that gathering a
    sharded model needs room for one tensor beside the file. At any time there is one version, or none.
    """

    def __init__(self, method: Literal["direct", "disk"], folder: str | os.PathLike[str]) -> None:
        """folder: of the run, for `disk`; made when missing.

        Raises ValueError: `direct` on a machine without shared memory.
        """
        self.method = method
        if method == "direct":
            if not SHARED_MEMORY.is_dir():
                raise ValueError(f"sync.method: direct needs {SHARED_MEMORY}, which this machine lacks; use disk")
            self.folder = Path(tempfile.mkdtemp(prefix="feynrl-weights-", dir=SHARED_MEMORY))
        else:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix="weights-", dir=Path(folder).resolve()))

    def publish(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """Write a version and return the update that `VLLMEngine.load_weights` takes (plain values, small).

        named_tensors: full tensors of any shape under Hugging Face names, in the dtype the engine computes in, on any
        device; a weight that is tied to another one may be left out. The previous version's file is removed first:
        engines keep no reference to it once their load returned.
        """
        self._remove_files()
        path = self.folder / f"version_{version:06d}.bin"
        names: list[str] = []
        dtypes: list[str] = []
        shapes: list[list[int]] = []
        offsets: list[int] = []
        size_bytes = checksum = 0
        with open(path, "wb") as file:
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
            if self.method == "disk":
                file.flush()
                os.fsync(file.fileno())  # another machine may read it next
        assert names, "an update without tensors"
        return {
            "version": version,
            "path": str(path),
            "names": names,
            "dtypes": dtypes,
            "shapes": shapes,
            "offsets": offsets,
            "size_bytes": size_bytes,
            "crc32": checksum,
        }

    def close(self) -> None:
        """Remove everything that was written."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _remove_files(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()
