"""The process group that weights are broadcast over: trainer rank 0 and every worker of every engine, nobody else.

NCCL between GPUs, gloo between CPU processes; one code path. Nothing here waits for ever: what does not move for
`timeout_seconds` raises `TransferFailed`, and so does a peer whose process ended.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

POLL_SECONDS = 0.0005
GRACE_SECONDS = 1.0  # of gloo, after our own time-out
GREETING = 20260801  # what rank 0 sends when the group stands; NCCL connects only with the first broadcast


class TransferFailed(RuntimeError):
    """The group could not be joined, or a transfer broke off. The group is of no more use; join another."""


class TransferGroup:
    """One member's end. Every broadcast is from rank 0."""

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        size: int,
        backend: str,
        device: torch.device,
        timeout_seconds: float,
        join_seconds: float,
        listening: socket.socket | None = None,
    ) -> None:
        """Join, or serve the rendezvous on `listening` (rank 0); returns when all `size` members are there.

        backend: "gloo" or "nccl". device: where the tensors to be broadcast are.
        timeout_seconds: longest time that a broadcast may stand still. join_seconds: longest time to wait for members.

        Raises TransferFailed: not all members came, or they cannot reach one another.
        """
        from vllm.distributed.utils import stateless_init_torch_distributed_process_group

        self.device = device
        self.timeout_seconds = join_seconds
        self.name = f"the weight group of {size} at {host}:{port} ({backend})"
        try:
            self._group: Any = stateless_init_torch_distributed_process_group(
                host, port, rank, size, backend, listen_socket=listening, timeout=timedelta(seconds=join_seconds)
            )
            greeting = torch.tensor([GREETING if rank == 0 else 0], device=device)
            self.finish(self.broadcast(greeting))
        except Exception as error:
            why = error.__context__ or error  # vLLM closes the socket of a failed store again, and raises about that
            raise TransferFailed(f"rank {rank} could not join {self.name} within {join_seconds:g} s: {why}") from error
        if int(greeting) != GREETING:
            raise TransferFailed(f"rank {rank} heard {int(greeting)} instead of a greeting in {self.name}")
        self.timeout_seconds = timeout_seconds
        # `finish` comes first, and says more. Whoever leaves waits for gloo's threads; NCCL's are aborted, and would end the
        # whole process after a time-out of theirs.
        own_seconds = timeout_seconds + GRACE_SECONDS if backend == "gloo" else 2 * timeout_seconds
        self._group.set_timeout(timedelta(seconds=own_seconds))

    def broadcast(self, tensor: Tensor) -> Any:
        """Begin to send (rank 0) or receive into `tensor`; returns what `finish` waits for. Raises TransferFailed."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with self._breaking_off():
            if self._group is None:
                raise RuntimeError("it was left before")
            return self._group.broadcast([tensor], options)

    def finish(self, work: Any) -> None:
        """Wait for a broadcast. Raises TransferFailed: it stood still for too long, or a peer is gone."""
        deadline = time.monotonic() + self.timeout_seconds
        with self._breaking_off():
            while not work.is_completed():
                if self._group is None:
                    raise RuntimeError("it was left meanwhile")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"nothing came through for {self.timeout_seconds:g} s")
                time.sleep(POLL_SECONDS)
            work.wait()

    @contextmanager
    def _breaking_off(self) -> Iterator[None]:
        """Errors inside mean that the group is of no more use; NCCL has some as soon as a broadcast begins."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            raise TransferFailed(f"{self.name} broke off: {error}") from error

    def close(self) -> None:
        """Leave. Peers in the middle of a broadcast see the connection end when no thread here waits in `finish` any more.

        With gloo a broadcast that a peer does not take part in is waited for, `timeout_seconds` and GRACE_SECONDS from its
        beginning: a little longer than `finish` did.
        """
        group, self._group = self._group, None
        if group is not None and self.device.type == "cuda":
            group.abort()  # NCCL's kernels wait for ever otherwise; gloo's threads end with the last reference


def listening_socket() -> socket.socket:
    """A socket that listens on a free port of all interfaces, for `TransferGroup(listening=...)`."""
    return socket.create_server(("", 0))
