"""A broadcast that cannot even begin is a failed transfer, which a job recovers from. A real gloo group."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rollouts.transfer_group import TransferFailed, TransferGroup, listening_socket

CPU = torch.device("cpu")


@pytest.fixture
def pair() -> Iterator[list[TransferGroup]]:
    listening = listening_socket()
    port = listening.getsockname()[1]
    with ThreadPoolExecutor(2) as pool:
        joining = [
            pool.submit(
                TransferGroup, "127.0.0.1", port, rank, 2, "gloo", CPU, timeout_seconds=5, join_seconds=30,
                listening=listening if rank == 0 else None,
            )
            for rank in (0, 1)
        ]  # fmt: skip
        groups = [one.result() for one in joining]
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
