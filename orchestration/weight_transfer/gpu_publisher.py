"""The sending side of `sync.method: direct` when trainer and engine share one GPU: versions stay in its memory (CUDA
IPC).

vLLM's IPC receiver opens them in the engine's worker. Not yet run on a GPU.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import ray
import torch
from torch import Tensor

from orchestration.cluster.gpu_bundles import shares_its_gpu
from rollouts.vllm.internals import ipc_handle
from rollouts.vllm.weight_broadcast import TransferFailed
from rollouts.vllm.weight_file import Checksum, TensorInfo


def is_beside_the_only_engine() -> bool:
    """Return whether this rank and the job's only engine share a GPU; see `gpu_bundles.reserve_devices`.

    When several GPUs are shared, engines on the other GPUs cannot see rank 0's memory: then all use host memory.
    """
    group, resources = ray.util.get_current_placement_group(), ray.get_runtime_context().get_assigned_resources()
    return group is not None and group.bundle_count == 1 and shares_its_gpu({"num_gpus": resources.get("GPU")})


class GpuPublisher:
    """The publisher on trainer rank 0, one per run. It holds one copy of the weights and overwrites it each time."""

    method = "direct"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies: dict[str, Tensor] = {}

    def publish(
        self, version: int, named_tensors: Iterable[tuple[str, Tensor]], adapter: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Copy a version and return the update that says where on the GPU it lies; see `WeightPublisher.publish`.

        Raise TransferFailed when there is no room for a copy of the weights.
        """
        tensors, handles, checksum = [], [], Checksum()
        for name, tensor in named_tensors:
            copy = self._room(name, tensor).copy_(tensor.detach())
            checksum.add(copy)
            tensors.append(TensorInfo.of(name, copy))
            handles.append(ipc_handle(copy))
        assert tensors, "an update without tensors"
        return {
            "version": version,
            "gpu": str(torch.cuda.get_device_properties(self.device).uuid),
            "tensors": [asdict(tensor) for tensor in tensors],
            "handles": pickle.dumps(handles),
            "size_bytes": sum(tensor.size_bytes for tensor in tensors),
            "checksum": checksum.value(),  # waits until all of it was written
            "adapter": adapter,
        }

    def _room(self, name: str, tensor: Tensor) -> Tensor:
        """Return the memory of the version before if the tensor fits there, else new memory."""
        before = self._copies.get(name)
        if before is None or (before.shape, before.dtype) != (tensor.shape, tensor.dtype):
            try:
                self._copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            except torch.OutOfMemoryError as error:
                raise TransferFailed(
                    "sync.method direct keeps a copy of the weights on the GPU that trainer and engine share, and there "
                    f"was no room for it; lower placement.engine_memory_share, or use disk ({error})"
                ) from error
        return self._copies[name]

    def close(self) -> None:
        """Free the memory, as soon as no engine has it open."""
        self._copies = {}
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()
