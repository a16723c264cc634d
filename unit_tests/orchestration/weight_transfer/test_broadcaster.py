"""What is broadcast is what comes in, bit for bit, and who stops in the middle is noticed. Real gloo groups."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestration.cluster.devices import resolve
from orchestration.weight_transfer import broadcaster
from orchestration.weight_transfer.broadcaster import WeightBroadcaster
from rollouts.vllm.transfer_group import TransferFailed, TransferGroup
from rollouts.vllm.weight_stream import BUCKET, Bucket, Header, checksum, receive_one, received, weighted_sums

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


class Joined:
    """A sender and receivers in threads of this process."""

    def __init__(self, receivers: int = 1, bucket_mib: float = 1.0, timeout_seconds: float = 5.0) -> None:
        size = receivers + 1
        self.sender = WeightBroadcaster(resolve("cpu"), bucket_mib)
        offer = self.sender.offer()
        self.pool = ThreadPoolExecutor(size)

        def join(rank: int) -> TransferGroup:
            return TransferGroup(
                **offer, rank=rank, size=size, device=CPU, timeout_seconds=timeout_seconds, join_seconds=30
            )

        joining = [self.pool.submit(join, rank) for rank in range(1, size)]
        self.sender.join(offer, size, timeout_seconds, 30)
        self.receivers = [one.result() for one in joining]

    def transfer(
        self, version: int, tensors: list[tuple[str, torch.Tensor]], adapter: Any = None
    ) -> list[list[Bucket]]:
        sending = self.pool.submit(self.sender.send, version, iter(tensors), adapter)
        receiving = [self.pool.submit(lambda g=group: list(received(g, version))) for group in self.receivers]
        sending.result()
        return [one.result() for one in receiving]

    def close(self) -> None:
        self.sender.close()
        for group in self.receivers:
            group.close()
        self.pool.shutdown()


@pytest.fixture(scope="module")
def joined() -> Iterator[Joined]:
    joined = Joined(receivers=2, bucket_mib=0.001)
    yield joined
    joined.close()


SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=8)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8])


@settings(deadline=None, max_examples=20)
@given(shapes=SHAPES, data=st.data())
def test_every_receiver_gets_every_tensor_bit_for_bit(joined: Joined, shapes: list[list[int]], data: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    sent = [
        (f"tensor.{i}", (100 * torch.randn(shape, generator=generator)).to(data.draw(DTYPES)))
        for i, shape in enumerate(shapes)
    ]
    sent.append(("larger than a bucket", torch.randn(400, generator=generator).as_strided((100, 2), (1, 100))))
    for buckets in joined.transfer(7, sent, {"r": 4}):
        came = [pair for bucket in buckets for pair in bucket.tensors]
        assert [name for name, _ in came] == [name for name, _ in sent]
        for (_, ours), (_, theirs) in zip(sent, came, strict=True):
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
            assert torch.equal(ours, theirs)
        assert {bucket.adapter["r"] for bucket in buckets} == {4}


def test_tensors_stay_as_they_came_while_further_buckets_come(joined: Joined) -> None:
    """vLLM keeps tensors until the rest of their layer is there."""
    sent = [(f"{i}", torch.full((200,), float(i))) for i in range(20)]
    for buckets in joined.transfer(8, sent):
        assert len(buckets) == 20
        assert [tensor.mean().item() for bucket in buckets for _, tensor in bucket.tensors] == list(range(20))


def test_gathering_goes_on_while_a_bucket_is_sent() -> None:
    """Of 6 buckets that take 0.1 s each to gather, and 0.1 s each to be received, hardly any time is waited twice."""
    joined = Joined(bucket_mib=0.001)

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(6):
            time.sleep(0.1)
            yield f"{i}", torch.zeros(300)

    def slowly_received() -> int:
        count = 0
        for _ in received(joined.receivers[0], 1):
            time.sleep(0.1)
            count += 1
        return count

    receiving = joined.pool.submit(slowly_received)
    started = time.monotonic()
    joined.sender.send(1, gathered())
    assert receiving.result() == 6
    assert time.monotonic() - started < 1.05  # 0.7 when they overlap whole, 1.2 in turn
    joined.close()


FOUR = [(f"{i}", torch.full((300,), float(i))) for i in range(4)]  # as many buckets


def refused(joined: Joined, message: str, version: int = 1) -> None:
    joined.pool.submit(joined.sender.send, 1, iter(FOUR))
    with pytest.raises(TransferFailed, match=message):
        list(received(joined.receivers[0], version))
    joined.close()


def test_another_version_than_was_announced_is_refused() -> None:
    refused(Joined(bucket_mib=0.001, timeout_seconds=1.0), "version 1 came, 2 was announced", version=2)


@pytest.mark.parametrize(("part", "old", "new"), [("description", b'"2"', b'"3"'), ("tensors", b"", b"?")])
def test_bytes_that_change_on_their_way_are_refused(part: str, old: bytes, new: bytes) -> None:
    """Also those that say what the others are: here a tensor would get another one's name."""
    joined = Joined(bucket_mib=0.001, timeout_seconds=1.0)
    group = joined.sender.group
    assert group is not None
    send, sent = group.broadcast, []

    def spoilt(tensor: torch.Tensor) -> Any:
        sent.append(tensor)
        if len(sent) == {"description": 8, "tensors": 9}[part]:  # of the third bucket
            whole = bytes(tensor.tolist())
            at = whole.index(old)
            tensor = torch.frombuffer(bytearray(whole[:at] + new + whole[at + len(new) :]), dtype=torch.uint8)
        return send(tensor)

    group.broadcast = spoilt  # type: ignore[method-assign]
    refused(joined, f"other bytes came than were sent .checksum of the {part} ")


@pytest.mark.parametrize(
    ("left", "message"),
    [(None, "3 tensors with 900 elements came of 4 with 1200"), (150, "4 tensors with 1050 elements")],
)
def test_tensors_that_were_not_packed_whole_are_missed(
    left: int | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was unpacked is counted, not what the buckets say of themselves."""
    flush = broadcaster._Stream.flush

    def forgetful(stream: Any) -> None:
        if stream.placed[0].name == "2":
            stream.placed = [dataclasses.replace(one, shape=[left]) for one in stream.placed if left]
        flush(stream)

    monkeypatch.setattr(broadcaster._Stream, "flush", forgetful)
    refused(Joined(bucket_mib=0.001, timeout_seconds=1.0), message)


def test_a_bucket_that_there_is_no_memory_for_is_a_failed_transfer() -> None:
    """Which a job recovers from, and which says what to change."""
    joined = Joined(bucket_mib=2**40)
    message = r"no room on cpu for a bucket of \d+ MiB \(it holds sync.bucket_mib"
    group = joined.sender.group
    assert group is not None
    group.broadcast(Header(BUCKET, 1, 1, data_bytes=2**60).to_tensor(CPU))
    with pytest.raises(TransferFailed, match=message):
        receive_one(joined.receivers[0], 1)
    with pytest.raises(TransferFailed, match=message):
        joined.sender.send(2, FOUR)
    joined.close()


def test_a_sender_that_cannot_go_on_ends_the_transfer() -> None:
    joined = Joined(bucket_mib=0.001)

    def breaks() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(300)
        yield "b", torch.zeros(300)
        raise ArithmeticError("gathering failed")

    receiving = joined.pool.submit(lambda: list(received(joined.receivers[0], 1)))
    with pytest.raises(ArithmeticError):
        joined.sender.send(1, breaks())
    with pytest.raises(TransferFailed):
        receiving.result(timeout=10)
    with pytest.raises(TransferFailed, match="no group"):
        joined.sender.send(2, [("a", torch.zeros(3))])
    joined.close()


@pytest.fixture
def sender_process(tmp_path: Path) -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def start(
        timeout_seconds: float, tensors: int, seconds_apart: float
    ) -> tuple[subprocess.Popen[str], TransferGroup]:
        torch.save([(f"{i}", torch.full((300,), float(i))) for i in range(tensors)], tmp_path / "tensors.pt")
        arguments = [str(timeout_seconds), str(tmp_path / "tensors.pt"), str(seconds_apart), "1"]
        process = subprocess.Popen(
            [sys.executable, "-m", "unit_tests.orchestration.ranks.broadcast_sender", *arguments],
            stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        offer = json.loads(process.stdout.readline())
        group = TransferGroup(**offer, rank=1, size=2, device=CPU, timeout_seconds=timeout_seconds, join_seconds=60)
        return process, group

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("sent", "seconds"), [(signal.SIGKILL, 5.0), (signal.SIGSTOP, 8.0)])
def test_a_sender_killed_or_frozen_in_the_middle_is_noticed_in_time(
    sender_process: Any, sent: int, seconds: float
) -> None:
    process, group = sender_process(timeout_seconds=2.0, tensors=100, seconds_apart=0.1)
    buckets = received(group, 1)
    for _ in range(5):
        next(buckets)
    os.kill(process.pid, sent)
    started = time.monotonic()
    with pytest.raises(TransferFailed, match="broke off"):
        list(buckets)
    assert time.monotonic() - started < seconds
    group.close()


def test_a_short_freeze_is_waited_for(sender_process: Any) -> None:
    process, group = sender_process(timeout_seconds=10.0, tensors=10, seconds_apart=0.05)
    buckets = received(group, 1)
    next(buckets)
    os.kill(process.pid, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (process.pid, signal.SIGCONT)).start()
    assert len(list(buckets)) == 9
    group.close()


def test_a_receiver_that_stands_still_is_noticed_by_the_sender() -> None:
    joined = Joined(bucket_mib=0.001, timeout_seconds=1.0)
    started = time.monotonic()
    with pytest.raises(TransferFailed, match=r"nothing came through for 1 s|broke off"):
        joined.sender.send(1, ((f"{i}", torch.zeros(2_000_000)) for i in range(50)))
    assert time.monotonic() - started < 6
    joined.close()


def test_a_group_whose_members_do_not_come_is_given_up() -> None:
    sender = WeightBroadcaster(resolve("cpu"), 1.0)
    offer = sender.offer()
    started = time.monotonic()
    with pytest.raises(TransferFailed, match=r"rank 0 could not join the weight group of 2 .* within 1 s"):
        sender.join(offer, 2, 1.0, 1.0)
    assert time.monotonic() - started < 10
    with pytest.raises(TransferFailed, match="rank 1 could not join"):
        TransferGroup(**offer, rank=1, size=2, device=CPU, timeout_seconds=1, join_seconds=1)


def test_a_group_is_made_anew_on_another_port() -> None:
    joined = Joined()
    before = joined.sender.group
    for group in joined.receivers:
        group.close()
    offer = joined.sender.offer()
    receiver = joined.pool.submit(
        lambda: TransferGroup(**offer, rank=1, size=2, device=CPU, timeout_seconds=9, join_seconds=30)
    )
    joined.sender.join(offer, 2, 9, 30)
    joined.receivers = [receiver.result()]
    assert joined.sender.group is not before
    assert len(joined.transfer(3, [("a", torch.zeros(3))])[0]) == 1
    joined.close()


@pytest.mark.parametrize("checksum", [checksum, weighted_sums])  # of CPUs, of other devices
def test_the_checksum_sees_single_bits_and_exchanged_words(checksum: Any) -> None:
    data = torch.randint(0, 256, (8 * 5000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    sound, chance = checksum(data), random.Random(0)
    for _ in range(200):
        changed = data.clone()
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        assert checksum(changed) != sound
        words = data.view(torch.int64).clone()
        i, j = chance.sample(range(len(words)), 2)
        words[[i, j]] = words[[j, i]]
        assert checksum(words.view(torch.uint8)) != sound
    assert -(2**63) <= sound < 2**63
