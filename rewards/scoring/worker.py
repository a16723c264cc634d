"""A scoring process: `python -m rewards.scoring.worker <socket fd> <parent pid> <limit seconds>`.

rewards/scoring/service.py starts it. Ordinary functions run in the main thread, one trajectory after the other; async
functions run side by side, for several trajectories, on an event loop in a second thread. Whatever a reward function
does is either an answer or the end of this process, and the service deals with both.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import math
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

from plugins.kinds import find
from plugins.marks import is_of_group
from plugins.parameters import check
from records.rollout import Group, Trajectory
from rewards.scoring.counted import Counted

LENGTH = struct.Struct("!Q")
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
    """The result of a scoring process for one trajectory."""

    reward: float | None  # None when a part failed
    parts: dict[str, float] = field(default_factory=dict)  # the unweighted parts that did not fail
    error: str | None = None
    seconds: float = 0.0


def send(sock: socket.socket, message: bytes) -> None:
    sock.sendall(LENGTH.pack(len(message)) + message)


def receive(sock: socket.socket) -> bytes:
    """Return one whole message; raise EOFError when the other side is gone."""
    return _exactly(sock, LENGTH.unpack(_exactly(sock, LENGTH.size))[0])


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


@dataclass(frozen=True)
class _Raised:
    """An error that a reward function raised, in the place of its return value."""

    error: BaseException


Parts = list[tuple[PartSpec, Callable[..., Any]]]


def call_parts(subject: Trajectory | Group, parts: Parts) -> list[Any]:
    """Call every part on a trajectory or group; return for each its value, an awaitable if async, or a _Raised."""
    outcomes: list[Any] = []
    for spec, function in parts:
        try:
            outcomes.append(function(subject, **spec.params))
        except BaseException as error:  # noqa: BLE001 a user's function may raise anything, SystemExit included
            outcomes.append(_Raised(error))
    return outcomes


def summed(parts: Parts, outcomes: list[Any], seconds: float) -> Score:
    """Return the weighted sum of the parts' values as a Score, whose reward is None when any part failed.

    A part fails when it raises, or pays what is no number, Inf or NaN.
    """
    total, by_name, errors = 0.0, {}, []
    for (spec, _), outcome in zip(parts, outcomes, strict=True):
        try:
            if isinstance(outcome, _Raised):
                raise outcome.error
            paid, counters = (outcome.value, outcome.counters) if isinstance(outcome, Counted) else (outcome, {})
            values = named_values(paid, spec.label)
            wrong = {name: value for name, value in values.items() if not math.isfinite(value)}
            if wrong and spec.weight:  # a part with weight 0 is only logged
                raise ValueError(f"it returned {', '.join(f'{name} = {value}' for name, value in wrong.items())}")
            by_name.update(values)
            by_name.update(named_values(counters, spec.label) if counters else {})
        except BaseException as error:  # noqa: BLE001
            tail = "".join(traceback.format_exception(error)).rstrip().splitlines()[-TRACEBACK_LINES:]
            errors.append(f"{spec.label}: {type(error).__name__}: {error}\n" + "\n".join(tail))
            continue
        if spec.weight:  # 0 times NaN is NaN
            total += spec.weight * sum(values.values())
    return Score(None if errors else total, by_name, "\n".join(errors) or None, seconds)


def summed_per_member(group: Group, parts: Parts, outcomes: list[Any], seconds: float) -> list[Score]:
    """Return one Score for each member of a group, from parts that returned a list."""
    members = [_per_member(outcome, len(group.trajectories)) for outcome in outcomes]
    return [summed(parts, [part[i] for part in members], seconds) for i in range(len(group.trajectories))]


def _per_member(outcome: Any, count: int) -> list[Any]:
    if isinstance(outcome, _Raised):
        return [outcome] * count
    if not isinstance(outcome, list | tuple | np.ndarray) or len(outcome) != count:
        error = TypeError(f"it returned {str(outcome)[:80]!r}; it must return a list of {count}, one per member")
        return [_Raised(error)] * count
    return list(outcome)


def named_values(value: Any, label: str) -> dict[str, float]:
    """Return a function's value as named numbers: {label: x}, or {label/key: x} for each key of a dict.

    Raises:
        TypeError: the value is no number and no dict of numbers.
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


async def _awaited(outcome: Any) -> Any:
    try:
        return await outcome if inspect.isawaitable(outcome) else outcome
    except BaseException as error:  # noqa: BLE001
        return _Raised(error)


def is_async(function: Callable[..., Any]) -> bool:
    by_call = getattr(function, "__call__", None)  # noqa: B004 an object whose __call__ is async counts too
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(by_call)


def _end_with_parent(sock: socket.socket, parent: int) -> None:
    """Kill this process and its children when the parent is gone, even while a reward function never returns."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    while not poll.poll(1000) and os.getppid() == parent:
        pass
    os.killpg(0, signal.SIGKILL)


class _Answers:
    """Score, send the answers from both threads, and keep the event loop on which async functions run."""

    def __init__(self, sock: socket.socket, parts: Parts) -> None:
        self.sock = sock
        self.trajectory_parts: Parts = [part for part in parts if not is_of_group(part[1])]
        self.group_parts: Parts = [part for part in parts if is_of_group(part[1])]
        self.sending = threading.Lock()
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def send(self, number: int, answer: Score | list[Score] | None) -> None:
        """Send the answer for a trajectory or group; None says that its scoring begins."""
        sys.stdout.flush()
        with self.sending:
            send(self.sock, pickle.dumps((number, answer)))

    def score(self, number: int, subject: Trajectory | Group) -> None:
        """Score a trajectory or group, and answer at once, or when the async parts are done."""
        self.send(number, None)
        started = time.monotonic()
        outcomes = call_parts(subject, self._parts(subject))
        if any(inspect.isawaitable(outcome) for outcome in outcomes):
            self.loop.call_soon_threadsafe(self._start, number, subject, outcomes, started)
        else:
            self.send(number, self._summed(subject, outcomes, started))

    def _parts(self, subject: Trajectory | Group) -> Parts:
        return self.group_parts if isinstance(subject, Group) else self.trajectory_parts

    def _summed(self, subject: Trajectory | Group, outcomes: list[Any], started: float) -> Score | list[Score]:
        seconds = time.monotonic() - started
        if isinstance(subject, Group):
            return summed_per_member(subject, self.group_parts, outcomes, seconds)
        return summed(self.trajectory_parts, outcomes, seconds)

    def cancel(self, number: int) -> None:
        self.loop.call_soon_threadsafe(self._cancel, number)

    def _start(self, number: int, subject: Trajectory | Group, outcomes: list[Any], started: float) -> None:
        self.tasks[number] = self.loop.create_task(self._finish(number, subject, outcomes, started))

    def _cancel(self, number: int) -> None:
        if number in self.tasks:
            self.tasks[number].cancel()

    async def _finish(self, number: int, subject: Trajectory | Group, outcomes: list[Any], started: float) -> None:
        answer: Score | list[Score]
        try:
            outcomes = await asyncio.gather(*map(_awaited, outcomes))
            answer = self._summed(subject, outcomes, started)
        except asyncio.CancelledError:  # the service gave up on this one, and waits until it has ended
            answer = Score(None, error="cancelled")
        del self.tasks[number]
        self.send(number, answer)


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with_parent, args=(sock, int(sys.argv[2])), daemon=True).start()
    parts: Parts = []
    try:
        for spec in pickle.loads(receive(sock)):
            check("reward", spec.function, spec.params)
            parts.append((spec, find("reward", spec.function)))
    except ValueError as error:
        send(sock, pickle.dumps((str(error), False, False)))
        return
    functions = [function for _, function in parts]
    send(sock, pickle.dumps((None, any(map(is_async, functions)), any(map(is_of_group, functions)))))
    answers = _Answers(sock, parts)
    limit = float(sys.argv[3])
    while True:
        try:
            number, subject = pickle.loads(receive(sock))
        except EOFError:
            return
        if subject is None:
            answers.cancel(number)
            continue
        # The service kills sooner. This ends an orphan whose function holds the interpreter's lock, so that the thread
        # that watches the parent never runs.
        faulthandler.dump_traceback_later(limit, exit=True)
        answers.score(number, subject)
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    # Pickles name this module's classes by the name under which the service imports it.
    from rewards.scoring import worker

    worker.main()
