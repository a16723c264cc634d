"""A scoring process: `python -m rewards.worker <socket fd> <parent pid> <limit seconds>`, started by rewards/service.py.

Scores one trajectory at a time, in the order they come over the socket. Whatever a reward function does is either an
answer or the end of this process; the service sees to the rest.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rewards.find import check_params, find_reward

_LENGTH = struct.Struct("!Q")
TRACEBACK_LINES = 12


@dataclass(frozen=True)
class PartSpec:
    """One reward function as a scoring process needs it."""

    label: str  # unique among the parts
    function: str
    weight: float
    params: dict[str, Any]


@dataclass(frozen=True)
class Score:
    """What a scoring process found for one trajectory."""

    reward: float | None  # None when a part failed
    parts: dict[str, float] = field(default_factory=dict)  # unweighted; those that did not fail
    error: str | None = None
    seconds: float = 0.0


def send(sock: socket.socket, message: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(message)) + message)


def receive(sock: socket.socket) -> bytes:
    """One whole message. Raises EOFError when the other side is gone."""
    return _exactly(sock, _LENGTH.unpack(_exactly(sock, _LENGTH.size))[0])


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def score(trajectory: Any, parts: list[tuple[PartSpec, Callable[..., Any]]]) -> Score:
    """Run every part on the trajectory; the reward is their weighted sum, or None when any failed."""
    started = time.monotonic()
    total, found, errors = 0.0, {}, []
    for spec, function in parts:
        try:
            value = function(trajectory, **spec.params)
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
            named = named_values(value, spec.label)
        except BaseException as error:  # noqa: BLE001 a user's function may raise anything, SystemExit included
            tail = "".join(traceback.format_exception(error)).rstrip().splitlines()[-TRACEBACK_LINES:]
            errors.append(f"{spec.label}: {type(error).__name__}: {error}\n" + "\n".join(tail))
            continue
        found.update(named)
        if spec.weight:  # a part that is only looked at: its NaN is not the reward's
            total += spec.weight * sum(named.values())
    seconds = time.monotonic() - started
    return Score(None if errors else total, found, "\n".join(errors) or None, seconds)


def named_values(value: Any, label: str) -> dict[str, float]:
    """A function's answer as named numbers: {label: x}, or {label/key: x} for each key of a dict.

    Inf and NaN are told as they are. Raises TypeError when it is anything else.
    """
    if isinstance(value, dict):
        if not value:
            raise TypeError("it returned an empty dict; it must return a number or named numbers")
        return {f"{label}/{key}": _number(x, f"the value of '{key}'") for key, x in value.items()}
    return {label: _number(value, "it")}


def _number(value: Any, what: str) -> float:
    if not isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
        raise TypeError(f"{what} is {type(value).__name__}, not a number: {str(value)[:80]!r}")
    return float(value)


async def _awaited(value: Any) -> Any:
    return await value


def _end_with_parent(sock: socket.socket, parent: int) -> None:
    """End this process and all it started when the parent is gone, also while a reward function never returns."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    while not poll.poll(1000) and os.getppid() == parent:
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with_parent, args=(sock, int(sys.argv[2])), daemon=True).start()
    try:
        parts = []
        for spec in pickle.loads(receive(sock)):
            function = find_reward(spec.function)
            check_params(function, f"reward '{spec.function}'", spec.params)
            parts.append((spec, function))
        send(sock, pickle.dumps(None))
    except ValueError as error:
        send(sock, pickle.dumps(str(error)))
        return
    limit = float(sys.argv[3])
    while True:
        try:
            message = receive(sock)
        except EOFError:
            return
        # The service kills sooner. This is for an orphan whose function holds the interpreter's lock, so that the
        # thread above never runs.
        faulthandler.dump_traceback_later(limit, exit=True)
        answer = score(pickle.loads(message), parts)
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        send(sock, pickle.dumps(answer))


if __name__ == "__main__":
    # Pickles name this module as the service imports it.
    from rewards import worker

    worker.main()
