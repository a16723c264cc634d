"""Both ends of `sync.method: nccl`: the group of trainer rank 0 and every worker of every engine, and the transfer of a
version.

A version is announced (names, dtypes, shapes), then its tensors come, and at the end the sender says how many there
were and their checksum. Between GPUs this is vLLM's NCCL communicator and its packed broadcast, between CPU processes
torch's gloo, tensor by tensor; engines load them in buckets. Nothing here waits for ever: a transfer that does not move
for `timeout_seconds` raises `TransferFailed`.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from rollouts.vllm import internals
from rollouts.vllm.weight_file import Checksum, Named, TensorInfo, bytes_of, refuse_other_bytes

Load = Callable[[list[Named]], None]

CPU = torch.device("cpu")
GREETING = 20260801  # what rank 0 sends when the group stands: members connect only with the first broadcast


class TransferFailed(RuntimeError):
    """The group could not be joined, or a transfer broke off. The group cannot be used again; join another one."""


class GlooGroup:
    """One member's end of a group of CPU processes. A broadcast is complete when the call returns."""

    device = CPU

    def __init__(self, host: str, port: int, rank: int, size: int, seconds: float, listening: Any) -> None:
        self._group: Any = internals.join_gloo_group(host, port, rank, size, seconds, listening)

    def set_timeout(self, seconds: float) -> None:
        self._group.set_timeout(timedelta(seconds=seconds))

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """Send (rank `src`) or receive into `tensor`. Raise TransferFailed when it stands still or a member is gone."""
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        try:
            self._group.broadcast([tensor], options).wait()
        except RuntimeError as error:
            raise TransferFailed(f"the weight broadcast broke off: {error}") from error

    def wait(self) -> None:
        pass

    def send_tensors(self, tensors: Iterable[Named], bucket_bytes: int) -> None:
        for _, tensor in tensors:
            self.broadcast(bytes_of(tensor))

    def receive_tensors(self, expected: list[TensorInfo], load: Load, bucket_bytes: int) -> None:
        bucket: list[Named] = []
        for info in expected:
            shape, dtype = info.kind
            bucket.append((info.name, torch.empty(shape, dtype=dtype)))
            self.broadcast(bytes_of(bucket[-1][1]))
            if sum(tensor.nbytes for _, tensor in bucket) > bucket_bytes or info is expected[-1]:
                load(bucket)  # vLLM looks up all its parameters in every call
                bucket = []

    def close(self) -> None:
        """Leave the group. A member in the middle of a broadcast sees the connection end."""
        self._group = None


class NcclGroup:
    """One member's end of a group of GPUs: vLLM's communicator and packed broadcast. Not yet run on a GPU.

    vLLM waits for ever for a member that is gone. So the communicator is aborted when a broadcast is under way and no
    further one begins within the time-out. That ends every wait, and what came meanwhile is refused.
    """

    def __init__(self, device: torch.device, communicator: Any, seconds: float) -> None:
        self.device, self._communicator, self._seconds = device, communicator, seconds
        self._timer = threading.Timer(seconds, communicator.destroy)

    def set_timeout(self, seconds: float) -> None:
        self._seconds = seconds

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """Begin to send (rank `src`) or receive into `tensor`, on the current stream. May raise TransferFailed."""
        self._timer.cancel()
        self._timer = threading.Timer(self._seconds, self._communicator.destroy)
        self._timer.daemon = True
        self._timer.start()
        try:
            self._communicator.broadcast(tensor, src)  # does nothing when it was aborted; `wait` sees that
        except RuntimeError as error:
            raise TransferFailed(f"the weight broadcast broke off: {error}") from error

    def wait(self) -> None:
        """Wait until the broadcasts on the current stream have ended. Raise TransferFailed when they did not."""
        torch.cuda.current_stream().synchronize()
        self._timer.cancel()
        if self._communicator.disabled:
            raise TransferFailed(f"the weight broadcast broke off: nothing came through for {self._seconds:g} s")

    def send_tensors(self, tensors: Iterator[Named], bucket_bytes: int) -> None:
        try:
            internals.send_over_nccl(self, tensors, bucket_bytes)
        except torch.OutOfMemoryError as error:
            raise TransferFailed(f"no room on {self.device} for a bucket; lower sync.bucket_mib ({error})") from error

    def receive_tensors(self, expected: list[TensorInfo], load: Load, bucket_bytes: int) -> None:
        internals.receive_over_nccl(self, iter([(info.name, info.kind) for info in expected]), load, bucket_bytes)

    def close(self) -> None:
        """Leave the group. A member in the middle of a broadcast waits for its own time-out."""
        self._timer.cancel()
        self._communicator.destroy()


WeightGroup = GlooGroup | NcclGroup


def join_group(
    host: str, port: int, backend: str, rank: int, size: int, device: torch.device, timeout_seconds: float,
    join_seconds: float, listening: socket.socket | None = None,
) -> WeightGroup:  # fmt: skip
    """Join a group, or serve its rendezvous on `listening` (rank 0); return when all `size` members are there.

    backend: "gloo" or "nccl". device: where the tensors to be broadcast are.
    timeout_seconds: the longest time that a broadcast may stand still. join_seconds: the longest time to wait for
    members.

    Raise TransferFailed when not all members came, or they cannot reach one another.
    """
    group: WeightGroup
    try:
        if backend == "gloo":
            group = GlooGroup(host, port, rank, size, join_seconds, listening)
        else:
            communicator = internals.join_nccl_group(host, port, rank, size, device, join_seconds, listening)
            group = NcclGroup(device, communicator, join_seconds)
        (greeting,) = numbers(group, GREETING if rank == 0 else 0)
        assert greeting == GREETING, f"{greeting} came instead of a greeting"
    except Exception as error:
        why = error.__context__ or error  # vLLM closes the socket of a failed store again, and raises about that
        name = f"the weight group of {size} at {host}:{port} ({backend})"
        raise TransferFailed(f"rank {rank} could not join {name} within {join_seconds:g} s: {why}") from error
    group.set_timeout(timeout_seconds)
    return group


def listening_socket(host: str) -> socket.socket:
    """Return a socket that listens on a free port, for `join_group(listening=...)`.

    It listens on loopback when the others know this machine by that address, else on all interfaces: a machine's
    address on the network need not be that of an interface.
    """
    return socket.create_server((host if host == "127.0.0.1" else "", 0))


@dataclass(frozen=True)
class Announcement:
    """What receivers learn of a version before its tensors come."""

    tensors: list[TensorInfo]
    adapter: dict[str, Any] | None  # PEFT's configuration when the tensors are an adapter's
    bucket_bytes: int


def send(group: WeightGroup, version: int, named_tensors: Iterable[Named], announcement: Announcement) -> None:
    """Broadcast a version, whose tensors are those announced, in that order. Raise TransferFailed when that fails."""
    text = torch.frombuffer(bytearray(json.dumps(asdict(announcement)).encode()), dtype=torch.uint8).to(group.device)
    numbers(group, version, len(text), Checksum([("", text)]).value())
    group.broadcast(text)
    checksum = Checksum()

    def summed() -> Iterator[Named]:
        for expected, (name, tensor) in zip(announcement.tensors, named_tensors, strict=True):
            assert TensorInfo.of(name, tensor) == expected, f"{name} is not {expected}, which was announced"
            checksum.add(tensor.detach())
            yield name, tensor.detach()

    group.send_tensors(summed(), announcement.bucket_bytes)
    numbers(group, len(announcement.tensors), checksum.value())


def receive_announcement(group: WeightGroup, version: int) -> Announcement:
    """Wait for a version's announcement. Raise ValueError when it is of another version, or its bytes came changed."""
    came, size_bytes, checksum = numbers(group, 0, 0, 0)
    if came != version:
        raise ValueError(f"version {came} came, {version} was announced")
    text = torch.empty(size_bytes, dtype=torch.uint8, device=group.device)
    group.broadcast(text)
    group.wait()
    refuse_other_bytes("of the announcement", Checksum([("", text)]).value(), checksum)
    fields = json.loads(bytes(text.tolist()))
    return Announcement(**{**fields, "tensors": [TensorInfo(**row) for row in fields["tensors"]]})


def receive(group: WeightGroup, announcement: Announcement, load: Load) -> None:
    """Receive the tensors that were announced, and load them as they come.

    Raise TransferFailed when the transfer breaks off, and ValueError when something else came than was sent.
    """
    checksum, count = Checksum(), 0

    def load_summed(tensors: list[Named]) -> None:
        nonlocal count
        count += len(tensors)
        for _, tensor in tensors:
            checksum.add(tensor)
        load(tensors)

    group.receive_tensors(announcement.tensors, load_summed, announcement.bucket_bytes)
    sent_count, sent_checksum = numbers(group, 0, 0)
    if count != sent_count:
        raise ValueError(f"{count} tensors came of {sent_count} sent")
    refuse_other_bytes("that came", checksum.value(), sent_checksum)


def numbers(group: WeightGroup, *values: int) -> list[int]:
    """Broadcast whole numbers and return those of rank 0. All members must give equally many."""
    tensor = torch.tensor(values, dtype=torch.int64, device=group.device)
    group.broadcast(tensor)
    group.wait()
    came: list[int] = tensor.tolist()
    return came
