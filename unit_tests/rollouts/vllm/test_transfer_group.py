"""A broadcast that cannot even begin is a failed transfer, which a job recovers from; so is one that a member takes no part in,
and the others leave it in time. Real gloo groups."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rollouts.vllm.transfer_group import TransferFailed, TransferGroup, listening_socket

CPU = torch.device("cpu")


def joined(size: int, timeout_seconds: float) -> list[TransferGroup]:
    """All members, in this process."""
    listening = listening_socket()
    port = listening.getsockname()[1]
    with ThreadPoolExecutor(size) as pool:
        joining = [
            pool.submit(
                TransferGroup, "127.0.0.1", port, rank, size, "gloo", CPU, timeout_seconds=timeout_seconds, join_seconds=30,
                listening=listening if rank == 0 else None,
            )
            for rank in range(size)
        ]  # fmt: skip
        return [one.result() for one in joining]


@pytest.fixture
def pair() -> Iterator[list[TransferGroup]]:
    groups = joined(2, timeout_seconds=5)
    yield groups
    for group in groups:
        group.close()


def test_an_error_as_a_broadcast_begins_is_a_failed_transfer(pair: list[TransferGroup]) -> None:
    with pytest.raises(TransferFailed, match=r"the weight group of 2 .* broke off: .*SparseCPU"):
        pair[0].broadcast(torch.zeros(3).to_sparse())


def test_so_is_a_broadcast_in_a_group_that_was_left(pair: list[TransferGroup]) -> None:
    pair[0].close()
    with pytest.raises(TransferFailed, match="it was left before"):
        pair[0].broadcast(torch.zeros(3))


def test_those_that_move_are_out_of_a_broken_group_well_before_they_would_be_taken_for_standing_still() -> None:
    """The watchdog waits for twice the time-out; gloo has a thread that goes on waiting for the member that takes no part."""
    timeout_seconds = 4.0
    groups = joined(3, timeout_seconds)

    def out_after(group: TransferGroup) -> float:
        began = time.monotonic()
        with pytest.raises(TransferFailed):
            for _ in range(2):
                group.finish(group.broadcast(torch.zeros(20_000_000)))  # more than sockets hold
        group.close()
        return time.monotonic() - began

    with ThreadPoolExecutor(2) as pool:
        seconds = list(pool.map(out_after, groups[:2]))
    assert max(seconds) < 1.6 * timeout_seconds
    groups[2].close()
