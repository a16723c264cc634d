"""The sending side of `sync.method: nccl`: trainer rank 0 broadcasts its weights to every worker of every engine."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import ray
import torch
from torch import Tensor

from orchestration.cluster.devices import DeviceSpec
from rollouts.vllm.weight_broadcast import (
    CPU,
    Announcement,
    TransferFailed,
    WeightGroup,
    join_group,
    listening_socket,
    send,
)
from rollouts.vllm.weight_file import TensorInfo

MIB = 1024**2


class WeightBroadcaster:
    """The sender on trainer rank 0: `offer` a rendezvous, `join` the others there, `send` version after version."""

    def __init__(self, device: DeviceSpec, bucket_mib: float) -> None:
        """Prepare without a group. bucket_mib: on a GPU, tensors are packed until they exceed this; one bucket is
        packed while another is sent."""
        self.backend = device.backend
        self.device = torch.device(device.device, torch.cuda.current_device()) if device.device == "cuda" else CPU
        self.bucket_bytes = int(bucket_mib * MIB)
        self.group: WeightGroup | None = None
        self._listening: Any = None

    def offer(self) -> dict[str, Any]:
        """Begin to listen on a free port; return what the others need to join."""
        self.close()
        host = ray.util.get_node_ip_address()
        self._listening = listening_socket(host)
        port = self._listening.getsockname()[1]
        return {"host": host, "port": port, "backend": self.backend}

    def join(self, offer: dict[str, Any], size: int, timeout_seconds: float, join_seconds: float) -> None:
        """Make the group with the `size` - 1 others, as rank 0. Raise TransferFailed when not all came in time."""
        listening, self._listening = self._listening, None
        self.group = join_group(
            **offer, rank=0, size=size, device=self.device, timeout_seconds=timeout_seconds, join_seconds=join_seconds,
            listening=listening,
        )  # fmt: skip

    def send(
        self,
        version: int,
        named_tensors: Iterable[tuple[str, Tensor]],
        tensors: list[TensorInfo],
        adapter: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Broadcast a version to receivers that are waiting for it.

        named_tensors: see `WeightPublisher.publish`. tensors: their descriptions, which receivers get before any is
        gathered.
        Return version, size_bytes, and seconds from the first tensor to the last receiver's end.

        Raise TransferFailed when a receiver is gone or stands still, or there is no memory for a bucket; the group
        cannot be used again, and is left.
        """
        if self.group is None:
            raise TransferFailed("there is no group to send to")
        assert tensors, "an update without tensors"
        started = time.monotonic()
        try:
            send(self.group, version, named_tensors, Announcement(tensors, adapter, self.bucket_bytes))
        except BaseException:
            self.close()
            raise
        size_bytes = sum(tensor.size_bytes for tensor in tensors)
        return {"version": version, "size_bytes": size_bytes, "seconds": time.monotonic() - started}

    def close(self) -> None:
        """Leave the group, and stop listening."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        if self.group is not None:
            self.group.close()
            self.group = None
