"""How a policy version travels through a `TransferGroup`: buckets of whole tensors, each with its checksums, then a count.

A bucket is three broadcasts: a header of fixed size, a description of the tensors, and their bytes. The last header holds
the totals of what the sender was given, so that a version is known to be whole. `orchestration.weight_transfer.broadcaster` sends; this file receives.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from rollouts.vllm.transfer_group import TransferFailed, TransferGroup

ALIGNMENT_BYTES = 64
ROW_WORDS = 1024
MIB = 1024**2
BUCKET, END = 1, 2


@dataclass(frozen=True)
class Header:
    """Travels as int64. A bucket's has no counts, the last one nothing but them."""

    kind: int  # BUCKET or END
    version: int
    description_bytes: int = 0
    description_checksum: int = 0
    data_bytes: int = 0
    data_checksum: int = 0
    tensors: int = 0  # of the whole version
    elements: int = 0

    def to_tensor(self, device: torch.device) -> Tensor:
        return torch.tensor(astuple(self), dtype=torch.int64, device=device)


HEADER_WORDS = len(Header.__dataclass_fields__)


@dataclass(frozen=True)
class Bucket:
    """Tensors that came together, as views into one piece of memory that nothing else uses."""

    tensors: list[tuple[str, Tensor]]
    adapter: dict[str, Any] | None  # PEFT's configuration when they are an adapter's


@dataclass(frozen=True)
class Placed:
    """Where in its bucket a tensor lies."""

    name: str
    dtype: str  # torch's name without "torch."
    shape: list[int]
    offset: int  # bytes

    @classmethod
    def of(cls, name: str, tensor: Tensor, offset: int) -> Placed:
        return cls(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset)


def bytes_of(tensor: Tensor) -> Tensor:
    """uint8 [N], where the tensor is; a view when that is possible."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def views(data: Tensor, placed: Iterable[Placed]) -> list[tuple[str, Tensor]]:
    """The tensors that lie in these bytes (uint8 [N])."""
    named = []
    for one in placed:
        dtype = getattr(torch, one.dtype)
        end = one.offset + torch.Size(one.shape).numel() * dtype.itemsize
        named.append((one.name, data[one.offset : end].view(dtype).view(one.shape)))
    return named


def aligned(size_bytes: int) -> int:
    """Where the next tensor may begin."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def described(placed: list[Placed], adapter: dict[str, Any] | None) -> bytes:
    """What a receiver must know of a bucket."""
    return json.dumps({"tensors": [asdict(one) for one in placed], "adapter": adapter}).encode()


def checksum(data: Tensor) -> int:
    """Of bytes (uint8 [N]; not on a CPU: N divisible by 8), at the speed of memory. Both ends of a transfer are of one kind of
    device, and use the same sum."""
    if data.device.type == "cpu":
        return digest(xxhash.xxh3_64(data.numpy().data))
    return weighted_sums(data)


def digest(hashed: xxhash.xxh3_64) -> int:
    """As a signed 64-bit number."""
    return int.from_bytes(hashed.digest(), "big", signed=True)


def weighted_sums(data: Tensor) -> int:
    """The checksum of bytes that are not in the CPU's memory: two weighted sums of 64-bit words, as Fletcher's. A word's
    weight is odd, so that a change of any one word is seen for certain, and depends on its place."""
    words = data.view(torch.int64)
    whole = len(words) // ROW_WORDS * ROW_WORDS
    rows = words[:whole].view(-1, ROW_WORDS)
    total = _weighted(rows.sum(0)) + 2 * _weighted(rows.sum(1)) + _weighted(words[whole:])
    return (total + 2**63) % 2**64 - 2**63


def _weighted(words: Tensor) -> int:
    return int((words * (2 * torch.arange(len(words), device=words.device) + 1)).sum())


def received(group: TransferGroup, version: int) -> Iterator[Bucket]:
    """The version's buckets in order; the next one comes in while the caller works on one.

    Raises TransferFailed: the transfer broke off, or something else came than was sent.
    """
    tensors = elements = 0
    with ThreadPoolExecutor(1, "weights") as pool:
        coming = pool.submit(receive_one, group, version)
        while True:
            header, bucket = coming.result()
            if bucket is None:
                break
            coming = pool.submit(receive_one, group, version)
            tensors += len(bucket.tensors)
            elements += sum(tensor.numel() for _, tensor in bucket.tensors)
            yield bucket
    if (tensors, elements) != (header.tensors, header.elements):
        raise TransferFailed(
            f"{tensors} tensors with {elements} elements came of {header.tensors} with {header.elements} sent"
        )


def receive_one(group: TransferGroup, version: int) -> tuple[Header, Bucket | None]:
    """The next header, and its bucket unless it is the last. Raises TransferFailed."""
    words = torch.empty(HEADER_WORDS, dtype=torch.int64, device=group.device)
    group.finish(group.broadcast(words))
    header = Header(*words.tolist())
    if header.version != version:
        raise TransferFailed(f"version {header.version} came, {version} was announced")
    if header.kind == END:
        return header, None
    description, data = room(header.description_bytes, group.device), room(header.data_bytes, group.device)
    for work in [group.broadcast(description), group.broadcast(data)]:
        group.finish(work)
    text = description.cpu()
    refuse_other_bytes("description", checksum(text), header.description_checksum)
    refuse_other_bytes("tensors", checksum(data), header.data_checksum)
    told = json.loads(bytes(text.tolist()))
    return header, Bucket(views(data, (Placed(**row) for row in told["tensors"])), told["adapter"])


def room(size_bytes: int, device: torch.device) -> Tensor:
    """Memory of a bucket, uint8 [size_bytes]. Raises TransferFailed: there is none."""
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise TransferFailed(
            f"no room on {device} for a bucket of {size_bytes / MIB:.0f} MiB (it holds sync.bucket_mib, or one tensor that is "
            f"larger): {error}"
        ) from error


def refuse_other_bytes(what: str, came: int, sent: int) -> None:
    """Compares the checksums of a part of a bucket. Raises TransferFailed."""
    if came != sent:
        raise TransferFailed(f"other bytes came than were sent (checksum of the {what} {came:x}, sent {sent:x})")
