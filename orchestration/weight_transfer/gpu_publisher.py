"""The sending side of `sync.method: direct` where trainer and engine share one GPU: versions stay in its memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import ray
import torch
from torch import Tensor

from orchestration.cluster.gpu_bundles import shares_its_gpu
from rollouts.vllm.gpu_memory import name_of, shared
from rollouts.vllm.transfer_group import TransferFailed
from rollouts.vllm.weight_stream import Placed, aligned, bytes_of, checksum

PIECE_BYTES = 256 * 1024**2


def is_beside_the_only_engine() -> bool:
    """Whether this rank and the job's one engine have a GPU between them (see `orchestration.cluster.gpu_bundles.placed`).

    Where more GPUs are shared, the engines on the others cannot see rank 0's memory: all are sent to by host memory.
    """
    group, resources = ray.util.get_current_placement_group(), ray.get_runtime_context().get_assigned_resources()
    return group is not None and group.bundle_count == 1 and shares_its_gpu({"num_gpus": resources.get("GPU")})


@dataclass
class _Piece:
    """Memory that engines can open. Tensors are put into it one behind the other, whole."""

    data: Tensor
    handle: bytes
    placed: list[Placed] = field(default_factory=list)
    filled_bytes: int = 0

    @classmethod
    def make(cls, size_bytes: int, device: torch.device) -> _Piece:
        try:
            data = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one, and a CPU's allocator raises no other
            raise TransferFailed(
                "sync.method direct keeps a copy of the weights on the GPU that trainer and engine share, and there was no "
                f"room for it; lower placement.engine_memory_share, or use disk ({error})"
            ) from error
        return cls(data, shared(data))

    def put(self, name: str, tensor: Tensor) -> None:
        data = bytes_of(tensor)
        self.data[self.filled_bytes : self.filled_bytes + len(data)].copy_(data)
        self.placed.append(Placed.of(name, tensor, self.filled_bytes))
        self.filled_bytes += aligned(len(data))

    def notice(self) -> dict[str, Any]:
        return {
            "handle": self.handle,
            "size_bytes": self.filled_bytes,
            "checksum": checksum(self.data[: self.filled_bytes]),  # waits until all of it was written
            "tensors": [asdict(one) for one in self.placed],
        }


class DevicePublisher:
    """Lives on trainer rank 0; one per run. Holds one copy of the weights in pieces, each of which is shared once and written
    again version after version: more memory is never taken than for the largest version."""

    method = "direct"

    def __init__(self, device: torch.device, piece_bytes: int = PIECE_BYTES) -> None:
        """piece_bytes: of memory that is taken at once; a larger tensor gets a piece of its own."""
        self.device, self.piece_bytes = device, piece_bytes
        self.pieces: list[_Piece] = []

    def publish(
        self, version: int, named_tensors: Iterable[tuple[str, Tensor]], adapter: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """As `WeightPublisher.publish`; the update says where on the GPU the version lies.

        Raises TransferFailed: there is no room for a copy of the weights.
        """
        for piece in self.pieces:
            piece.placed, piece.filled_bytes = [], 0
        used = 0
        for name, tensor in named_tensors:
            size_bytes = aligned(tensor.nbytes)
            if not used or self.pieces[used - 1].filled_bytes + size_bytes > len(self.pieces[used - 1].data):
                used += 1
                self._have(used, size_bytes)
            self.pieces[used - 1].put(name, tensor.detach())
        assert used, "an update without tensors"
        notices = [piece.notice() for piece in self.pieces[:used]]
        return {
            "version": version,
            "gpu": name_of(self.device),
            "pieces": notices,
            "size_bytes": sum(notice["size_bytes"] for notice in notices),
            "adapter": adapter,
        }

    def _have(self, used: int, size_bytes: int) -> None:
        """Make piece number `used` (from 1) if there is none, or another one in its place if it is too small."""
        if used > len(self.pieces):
            self.pieces.append(_Piece.make(max(size_bytes, self.piece_bytes), self.device))
        elif len(self.pieces[used - 1].data) < size_bytes:
            self.pieces[used - 1] = _Piece.make(size_bytes, self.device)

    def close(self) -> None:
        """Give the memory back, when no engine has it open any more."""
        self.pieces = []
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()
