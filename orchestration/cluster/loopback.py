"""Keep a job on one machine to the loopback interface, so that nobody else on the network can connect to it."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

LOOPBACK = "127.0.0.1"
INTERFACES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # where collectives listen


@contextmanager
def ray_on_loopback() -> Iterator[dict[str, str]]:
    """Yield what makes a `ray.init` in the block listen on loopback only and ask everybody for this user's token.

    Ray takes 127.0.0.1 as a wish for this machine's address on the network, unless it believes that this operating
    system has no clusters.
    """
    from ray._private import ray_constants
    from ray._raylet import Config  # type: ignore[attr-defined]

    os.environ["RAY_AUTH_MODE"] = "token"
    Config.initialize("")  # Ray read the environment when it was imported
    keep_token_private()
    for name, interface in INTERFACES.items():
        os.environ.setdefault(name, interface)
    has_clusters, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield {"_node_ip_address": LOOPBACK}
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = has_clusters


def keep_token_private() -> None:
    """Make the token with which this user's Ray sessions are entered, if there is none; nobody else may read it."""
    if "RAY_AUTH_TOKEN" in os.environ:
        return
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:  # which only its owner may read
            file.write(secrets.token_hex(32))
            file.flush()
            with suppress(FileExistsError):  # another job made it meanwhile
                os.link(file.name, path)
    with suppress(PermissionError):  # it may be given by an administrator
        path.chmod(0o600)


def init_method() -> str | None:
    """Return how torch.distributed is to bring the ranks together: None for its own way, by the environment.

    Torch's own rendezvous listens on all interfaces, whatever MASTER_ADDR says.
    """
    from torch.distributed import register_rendezvous_handler

    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # which has begun to listen already
    if by_torchrun or os.environ["MASTER_ADDR"] not in (LOOPBACK, "localhost"):
        return None
    for name, interface in INTERFACES.items():
        os.environ.setdefault(name, interface)
    with suppress(RuntimeError):  # known from an earlier job of this process
        register_rendezvous_handler("loopback", _meet_on_loopback)
    return "loopback://"


def _meet_on_loopback(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield the store, the rank and the number of ranks, as torch wants it of a rendezvous."""
    from torch.distributed import TCPStore

    rank, ranks, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    listening = socket.create_server((LOOPBACK, port)).detach() if rank == 0 else None
    yield TCPStore(LOOPBACK, port, ranks, rank == 0, timeout, False, master_listen_fd=listening), rank, ranks
