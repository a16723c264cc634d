"""The sending side of `sync.method: nccl`: trainer rank 0 broadcasts its weights to every worker of every engine."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import ray
import torch
from torch import Tensor

from orchestration.cluster.devices import DeviceSpec
from rollouts.vllm.transfer_group import TransferFailed, TransferGroup, listening_socket
from rollouts.vllm.weight_stream import (
    ALIGNMENT_BYTES,
    BUCKET,
    END,
    MIB,
    Header,
    Placed,
    aligned,
    bytes_of,
    checksum,
    described,
    room,
)


class WeightBroadcaster:
    """Lives on trainer rank 0. `offer` a rendezvous, `join` with those who were told of it, `send` version after version."""

    def __init__(self, device: DeviceSpec, bucket_mib: float) -> None:
        """bucket_mib: two buckets of this size are kept, one being filled while the other is sent, also for the versions that
        follow; a tensor that is larger travels alone, and makes its bucket as large as itself."""
        self.backend = device.backend
        self.device = torch.device(device.device, torch.cuda.current_device()) if device.device == "cuda" else CPU
        self.bucket_bytes = int(bucket_mib * MIB)
        self.buffers = self._no_buffers()
        self.group: TransferGroup | None = None
        self._listening: Any = None

    def offer(self) -> dict[str, Any]:
        """Begin to listen on a free port; returns what the others must be told to join."""
        self.close()
        self._listening = listening_socket()
        host, port = ray.util.get_node_ip_address(), self._listening.getsockname()[1]
        return {"host": host, "port": port, "backend": self.backend}

    def join(self, offer: dict[str, Any], size: int, timeout_seconds: float, join_seconds: float) -> None:
        """Make the group with the `size` - 1 others, as rank 0. Raises TransferFailed: not all came in time."""
        listening, self._listening = self._listening, None
        self.group = TransferGroup(
            **offer, rank=0, size=size, device=self.device, timeout_seconds=timeout_seconds, join_seconds=join_seconds,
            listening=listening,
        )  # fmt: skip

    def send(
        self, version: int, named_tensors: Iterable[tuple[str, Tensor]], adapter: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Broadcast a version to receivers that are waiting for it; arguments as of `WeightPublisher.publish`.

        Returns version, size_bytes, and seconds from the first tensor to the last receiver's end.
        Raises TransferFailed: a receiver is gone or stands still, or there is no memory for a bucket; the group is then of no
        more use, and is left.
        """
        if self.group is None:
            raise TransferFailed("there is no group to send to")
        started = time.monotonic()
        stream = _Stream(self.group, self.buffers, version, self.bucket_bytes, adapter)
        try:
            for name, tensor in named_tensors:
                stream.add(name, tensor.detach())
            stream.end()
        except BaseException:
            stream.under_way.clear()
            self.buffers = self._no_buffers()  # threads of the broken group may still read the ones there are
            self.close()
            raise
        return {"version": version, "size_bytes": stream.size_bytes, "seconds": time.monotonic() - started}

    def _no_buffers(self) -> list[Tensor]:
        return [torch.empty(0, dtype=torch.uint8, device=self.device) for _ in range(2)]

    def close(self) -> None:
        """Leave the group, and listen no more."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        if self.group is not None:
            self.group.close()
            self.group = None


CPU = torch.device("cpu")


class _Stream:
    """One version on its way: two buckets, of which one is filled while the other is sent."""

    def __init__(
        self,
        group: TransferGroup,
        buffers: list[Tensor],
        version: int,
        bucket_bytes: int,
        adapter: dict[str, Any] | None,
    ) -> None:
        """buffers: two, which grow as tensors ask for it."""
        self.group, self.buffers = group, buffers
        self.version, self.bucket_bytes, self.adapter = version, bucket_bytes, adapter
        self.under_way: list[list[tuple[Any, Tensor]]] = [[], []]  # of each buffer: broadcasts, and what they read
        self.filling = 0
        self.placed: list[Placed] = []
        self.filled_bytes = self.size_bytes = 0
        self.tensors = self.elements = 0  # that were to be sent

    def add(self, name: str, tensor: Tensor) -> None:
        """Put a tensor into the bucket, after sending the bucket when it has no room."""
        if self.placed and self.filled_bytes + tensor.nbytes > self.bucket_bytes:
            self.flush()
        if not self.placed:
            self._make_room(max(tensor.nbytes, self.bucket_bytes) + ALIGNMENT_BYTES)
        data = bytes_of(tensor)
        self.buffers[self.filling][self.filled_bytes : self.filled_bytes + len(data)].copy_(data)
        self.placed.append(Placed.of(name, tensor, self.filled_bytes))
        self.filled_bytes += aligned(len(data))
        self.tensors += 1
        self.elements += tensor.numel()

    def flush(self) -> None:
        """Begin to send the bucket, and turn to the other one."""
        data, device = self.buffers[self.filling][: self.filled_bytes], self.group.device
        text = torch.frombuffer(bytearray(described(self.placed, self.adapter)), dtype=torch.uint8)
        header = Header(BUCKET, self.version, len(text), checksum(text), len(data), checksum(data))
        parts = [header.to_tensor(device), text.to(device), data]
        self.under_way[self.filling] = [(self.group.broadcast(part), part) for part in parts]
        self.size_bytes += len(data)
        self.placed, self.filled_bytes = [], 0
        self.filling = 1 - self.filling

    def end(self) -> None:
        """Send what is left, say how much there was, and wait until all of it arrived."""
        if self.placed:
            self.flush()
        assert self.tensors, "an update without tensors"
        last = Header(END, self.version, tensors=self.tensors, elements=self.elements).to_tensor(self.group.device)
        work = self.group.broadcast(last)
        for i in (self.filling, 1 - self.filling):  # the older one first
            self._wait(i)
        self.group.finish(work)

    def _make_room(self, size: int) -> None:
        self._wait(self.filling)
        if len(self.buffers[self.filling]) < size:
            self.buffers[self.filling] = room(size, self.group.device)

    def _wait(self, i: int) -> None:
        for work, _ in self.under_way[i]:
            self.group.finish(work)
        self.under_way[i] = []
