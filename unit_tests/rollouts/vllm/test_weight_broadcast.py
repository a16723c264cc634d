"""Weights over vLLM's NCCL communicator and packed broadcast, with stand-ins for what only a GPU has: the communicator
(two threads and a queue) and CUDA's streams. Packing, buckets, counts, checksums and the time-out are the code that
runs on a GPU."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rollouts.vllm.weight_broadcast import Announcement, NcclGroup, TransferFailed, receive, receive_announcement, send
from rollouts.vllm.weight_file import Named, TensorInfo

CPU = torch.device("cpu")


class Stream:
    """In the place of a CUDA stream, on which everything is done at once."""

    def synchronize(self) -> None:
        pass


class Communicator:
    """In the place of vLLM's PyNcclCommunicator: rank 0 puts bytes into a queue, rank 1 takes them out."""

    def __init__(self, rank: int, line: queue.Queue[torch.Tensor], aborted: threading.Event) -> None:
        self.rank, self.line, self.aborted = rank, line, aborted
        self.broadcasts = 0

    @property
    def disabled(self) -> bool:
        return self.aborted.is_set()

    def destroy(self) -> None:
        self.aborted.set()

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self.broadcasts += 1
        if self.rank == src:
            self.line.put(tensor.clone())
        while self.rank != src and not self.disabled:  # as NCCL, which waits for ever
            try:
                tensor.copy_(self.line.get(timeout=0.01))
                return
            except queue.Empty:
                pass


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> tuple[NcclGroup, NcclGroup]:
    from vllm.distributed.weight_transfer import packed_tensor

    monkeypatch.setattr(packed_tensor, "_get_streams", lambda _, count: (Stream(),) * count)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    line: queue.Queue[torch.Tensor] = queue.Queue()
    sender, receiver = (Communicator(rank, line, threading.Event()) for rank in range(2))
    return NcclGroup(CPU, sender, seconds=1.0), NcclGroup(CPU, receiver, seconds=1.0)


SENT = [(f"{i}", torch.randn(100 + i, 7).to([torch.float32, torch.bfloat16][i // 5])) for i in range(10)]
INFOS = [TensorInfo.of(*pair) for pair in SENT]


def passed(ends: tuple[NcclGroup, NcclGroup], announcement: Announcement) -> tuple[list[Named], Announcement]:
    came: list[Named] = []
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, ends[0], 3, iter(SENT), announcement)
        heard = receive_announcement(ends[1], 3)
        receive(ends[1], heard, came.extend)
        sending.result()
    return came, heard


@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(1, 10), (4000, 5), (10**6, 1)])
def test_tensors_come_bit_for_bit_in_buckets(
    ends: tuple[NcclGroup, NcclGroup], bucket_bytes: int, buckets: int
) -> None:
    came, heard = passed(ends, Announcement(INFOS, {"r": 4}, bucket_bytes))
    assert heard == Announcement(INFOS, {"r": 4}, bucket_bytes)
    for (name, ours), (told, theirs) in zip(SENT, came, strict=True):
        assert name == told and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    assert ends[1]._communicator.broadcasts == 3 + buckets  # two numbers, the announcement


def test_other_bytes_than_were_sent_are_refused(ends: tuple[NcclGroup, NcclGroup]) -> None:
    put, count = ends[0]._communicator.line.put, iter(range(10))
    ends[0]._communicator.line.put = lambda tensor: put(255 - tensor if next(count) == 2 else tensor)
    with pytest.raises(ValueError, match="the bytes that came are not those sent"):
        passed(ends, Announcement(INFOS, None, 10**6))


def test_what_stands_still_is_aborted(ends: tuple[NcclGroup, NcclGroup]) -> None:
    """NCCL itself waits for ever. Whoever comes later to the aborted group is refused too."""
    with pytest.raises(TransferFailed, match="nothing came through for 1 s"):
        receive_announcement(ends[1], 3)
    with pytest.raises(TransferFailed):
        receive_announcement(ends[1], 3)


def test_a_bucket_that_there_is_no_room_for_names_the_key_to_change(
    ends: tuple[NcclGroup, NcclGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "cat", full)
    with pytest.raises(TransferFailed, match=r"no room on cpu for a bucket; lower sync\.bucket_mib"):
        send(ends[0], 3, iter(SENT), Announcement(INFOS, None, 10))
