"""What is broadcast is what comes in, bit for bit, and who stops in the middle is noticed. Real gloo groups."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestration.cluster.devices import resolve
from orchestration.weight_transfer.broadcaster import WeightBroadcaster
from rollouts.vllm.weight_broadcast import Load, TransferFailed, WeightGroup, join_group, receive, receive_announcement
from rollouts.vllm.weight_file import Named, TensorInfo

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


def received(group: WeightGroup, version: int, load: Load | None = None) -> tuple[list[Named], Any]:
    """All tensors of a version, and the adapter it is announced as."""
    tensors: list[Named] = []
    announcement = receive_announcement(group, version)
    receive(group, announcement, load or tensors.extend)
    return tensors, announcement.adapter


class Joined:
    """A sender and receivers in threads of this process."""

    def __init__(self, receivers: int = 1, timeout_seconds: float = 5.0) -> None:
        self.size, self.timeout_seconds = receivers + 1, timeout_seconds
        self.sender = WeightBroadcaster(resolve("cpu"), bucket_mib=1.0)
        self.pool = ThreadPoolExecutor(self.size)
        self.join()

    def join(self) -> None:
        offer, seconds = self.sender.offer(), self.timeout_seconds
        joining = [
            self.pool.submit(
                join_group, **offer, rank=rank, size=self.size, device=CPU, timeout_seconds=seconds, join_seconds=30
            )
            for rank in range(1, self.size)
        ]
        self.sender.join(offer, self.size, seconds, 30)
        self.receivers = [one.result() for one in joining]

    def send(self, version: int, tensors: list[Named], adapter: Any = None) -> Any:
        return self.pool.submit(self.sender.send, version, iter(tensors), infos(tensors), adapter)

    def transfer(self, version: int, tensors: list[Named], adapter: Any = None) -> list[tuple[list[Named], Any]]:
        sending = self.send(version, tensors, adapter)
        receiving = [self.pool.submit(received, group, version) for group in self.receivers]
        sending.result()
        return [one.result() for one in receiving]

    def close(self) -> None:
        self.sender.close()
        for group in self.receivers:
            group.close()
        self.pool.shutdown()


def infos(tensors: Iterable[Named]) -> list[TensorInfo]:
    return [TensorInfo.of(name, tensor) for name, tensor in tensors]


@pytest.fixture(scope="module")
def joined() -> Iterator[Joined]:
    joined = Joined(receivers=2)
    yield joined
    joined.close()


SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=8)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8])


@settings(deadline=None, max_examples=20)
@given(shapes=SHAPES, data=st.data())
def test_every_receiver_gets_every_tensor_bit_for_bit(joined: Joined, shapes: list[list[int]], data: Any) -> None:
    """And each keeps what it was while further ones come: vLLM holds tensors until the rest of their layer is there."""
    generator = torch.Generator().manual_seed(0)
    sent = [
        (f"tensor.{i}", (100 * torch.randn(shape, generator=generator)).to(data.draw(DTYPES)))
        for i, shape in enumerate(shapes)
    ]
    sent.append(("strided", torch.randn(400, generator=generator).as_strided((100, 2), (1, 100))))
    for came, adapter in joined.transfer(7, sent, {"r": 4}):
        assert [name for name, _ in came] == [name for name, _ in sent]
        for (_, ours), (_, theirs) in zip(sent, came, strict=True):
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
            assert torch.equal(ours, theirs)
        assert adapter == {"r": 4}


FOUR = [(f"{i}", torch.full((300,), float(i))) for i in range(4)]


def test_another_version_than_was_announced_is_refused() -> None:
    joined = Joined(timeout_seconds=1.0)
    joined.send(1, FOUR)
    with pytest.raises(ValueError, match="version 1 came, 2 was announced"):
        received(joined.receivers[0], 2)
    joined.close()


@pytest.mark.parametrize(("call", "what"), [(2, "of the announcement"), (5, "that came")])
def test_bytes_that_change_on_their_way_are_refused(call: int, what: str) -> None:
    """Also those that say what the others are: a tensor would get another one's name."""
    joined = Joined(timeout_seconds=1.0)
    group: Any = joined.sender.group
    send, calls = group.broadcast, []

    def spoilt(tensor: torch.Tensor, src: int = 0) -> None:
        calls.append(tensor)
        send(255 - tensor if len(calls) == call else tensor, src)

    group.broadcast = spoilt
    joined.send(1, FOUR)
    with pytest.raises(ValueError, match=f"the bytes {what} are not those sent"):
        received(joined.receivers[0], 1)
    joined.close()


def test_a_tensor_that_does_not_come_out_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever loses it on the receiver's side: tensors that were loaded are counted, not those announced."""
    joined = Joined(timeout_seconds=1.0)
    group: Any = joined.receivers[0]
    take = group.receive_tensors

    def forgetful(expected: list[TensorInfo], load: Load, bucket_bytes: int) -> None:
        take(expected, lambda tensors: load([pair for pair in tensors if pair[0] != "2"]), bucket_bytes)

    monkeypatch.setattr(group, "receive_tensors", forgetful)
    joined.send(1, FOUR)
    with pytest.raises(ValueError, match="3 tensors came of 4 sent"):
        received(group, 1)
    joined.close()


def test_other_tensors_than_were_announced_are_not_sent() -> None:
    joined = Joined()
    joined.pool.submit(received, joined.receivers[0], 1)
    with pytest.raises(AssertionError, match="which was announced"):
        joined.sender.send(1, [("a", torch.zeros(3))], infos([("a", torch.zeros(4))]))
    joined.close()


def test_a_sender_that_cannot_go_on_ends_the_transfer() -> None:
    joined = Joined()

    def breaks() -> Iterator[Named]:
        yield from FOUR[:2]
        raise ArithmeticError("gathering failed")

    receiving = joined.pool.submit(received, joined.receivers[0], 1)
    with pytest.raises(ArithmeticError):
        joined.sender.send(1, breaks(), infos(FOUR))
    with pytest.raises(TransferFailed, match="broke off"):
        receiving.result(timeout=60)
    with pytest.raises(TransferFailed, match="no group"):
        joined.sender.send(2, FOUR, infos(FOUR))
    joined.close()


@pytest.fixture
def sender_process(tmp_path: Path) -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def start(timeout_seconds: float, tensors: int, seconds_apart: float) -> tuple[subprocess.Popen[str], WeightGroup]:
        torch.save([(f"{i}", torch.full((300,), float(i))) for i in range(tensors)], tmp_path / "tensors.pt")
        arguments = [str(timeout_seconds), str(tmp_path / "tensors.pt"), str(seconds_apart), "1"]
        process = subprocess.Popen(
            [sys.executable, "-m", "unit_tests.orchestration.ranks.broadcast_sender", *arguments],
            stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        offer = json.loads(process.stdout.readline())
        group = join_group(**offer, rank=1, size=2, device=CPU, timeout_seconds=timeout_seconds, join_seconds=60)
        return process, group

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sender_killed_or_frozen_in_the_middle_is_noticed_in_time(sender_process: Any, sent: int) -> None:
    process, group = sender_process(timeout_seconds=6.0, tensors=100, seconds_apart=0.05)
    struck: list[float] = []

    def strike(tensors: list[Named]) -> None:
        if tensors[0][0] == "5":
            os.kill(process.pid, sent)
            struck.append(time.monotonic())

    with pytest.raises(TransferFailed, match="broke off"):
        received(group, 1, strike)
    assert time.monotonic() - struck[0] < 50, "the time-out is 6 s, and 60 for a group to come together"
    group.close()


def test_a_short_freeze_is_waited_for(sender_process: Any) -> None:
    process, group = sender_process(timeout_seconds=10.0, tensors=10, seconds_apart=0.05)
    came: list[str] = []

    def freeze(tensors: list[Named]) -> None:
        came.append(tensors[0][0])
        if len(came) == 1:
            os.kill(process.pid, signal.SIGSTOP)
            threading.Timer(1.0, os.kill, (process.pid, signal.SIGCONT)).start()

    received(group, 1, freeze)
    assert len(came) == 10
    group.close()


def test_those_that_move_are_out_of_a_broken_group_well_before_they_would_be_taken_for_standing_still() -> None:
    """One of two receivers takes no part. The watchdog waits for twice the time-out."""
    joined, large = Joined(receivers=2, timeout_seconds=4.0), [("a", torch.zeros(20_000_000))]  # more than sockets hold
    began = time.monotonic()
    sending = joined.send(1, large)
    with pytest.raises(TransferFailed, match="broke off"):
        received(joined.receivers[0], 1)
    joined.receivers[0].close()
    with pytest.raises(TransferFailed, match="broke off"):
        sending.result()
    assert time.monotonic() - began < 1.9 * 4.0
    joined.close()


def test_a_group_whose_members_do_not_come_is_given_up() -> None:
    sender = WeightBroadcaster(resolve("cpu"), 1.0)
    offer = sender.offer()
    started = time.monotonic()
    with pytest.raises(TransferFailed, match=r"rank 0 could not join the weight group of 2 .* within 1 s"):
        sender.join(offer, 2, 1.0, 1.0)
    assert time.monotonic() - started < 30
    with pytest.raises(TransferFailed, match="rank 1 could not join"):
        join_group(**offer, rank=1, size=2, device=CPU, timeout_seconds=1, join_seconds=1)


def test_a_group_is_made_anew_on_another_port() -> None:
    joined = Joined()
    before = joined.sender.group
    for group in joined.receivers:
        group.close()
    joined.join()
    assert joined.sender.group is not before
    assert len(joined.transfer(3, FOUR)[0][0]) == 4
    joined.close()
