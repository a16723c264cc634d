"""A scoring process: `python -m rewards.scoring.worker <socket fd> <parent pid> <limit seconds>`, started by rewards/scoring/service.py.

Ordinary functions run in the main thread, one trajectory after the other; async ones of several trajectories run side
by side on an event loop in a second thread. Whatever a reward function does is either an answer or the end of this
process; the service sees to the rest.
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

from plugins.lookup import check_params, find_reward, is_of_group
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
    """What a scoring process found for one trajectory."""

    reward: float | None  # None when a part failed
    parts: dict[str, float] = field(default_factory=dict)  # unweighted; those that did not fail
    error: str | None = None
    seconds: float = 0.0


def send(sock: socket.socket, message: bytes) -> None:
    sock.sendall(LENGTH.pack(len(message)) + message)


def receive(sock: socket.socket) -> bytes:
    """One whole message. Raises EOFError when the other side is gone."""
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
    """What a reward function raised, in the place of what it should have returned."""

    error: BaseException


Parts = list[tuple[PartSpec, Callable[..., Any]]]


def called(subject: Trajectory | Group, parts: Parts) -> list[Any]:
    """Call every part on the trajectory or group: what each returned (an async one: what is to be awaited), or a _Raised."""
    outcomes: list[Any] = []
    for spec, function in parts:
        try:
            outcomes.append(function(subject, **spec.params))
        except BaseException as error:  # noqa: BLE001 a user's function may raise anything, SystemExit included
            outcomes.append(_Raised(error))
    return outcomes


def summed(parts: Parts, outcomes: list[Any], seconds: float) -> Score:
    """The weighted sum of what the parts returned, or None when any failed."""
    total, found, errors = 0.0, {}, []
    for (spec, _), outcome in zip(parts, outcomes, strict=True):
        try:
            if isinstance(outcome, _Raised):
                raise outcome.error
            paid, counters = (outcome.value, outcome.counters) if isinstance(outcome, Counted) else (outcome, {})
            named = named_values(paid, spec.label)
            found.update(named)
            found.update(named_values(counters, spec.label) if counters else {})
        except BaseException as error:  # noqa: BLE001
            tail = "".join(traceback.format_exception(error)).rstrip().splitlines()[-TRACEBACK_LINES:]
            errors.append(f"{spec.label}: {type(error).__name__}: {error}\n" + "\n".join(tail))
            continue
        if spec.weight:  # a part that is only looked at: its NaN is not the reward's
            total += spec.weight * sum(named.values())
    return Score(None if errors else total, found, "\n".join(errors) or None, seconds)


def summed_per_member(group: Group, parts: Parts, outcomes: list[Any], seconds: float) -> list[Score]:
    """The same for each member of a group, of parts that returned a list."""
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


async def _awaited(outcome: Any) -> Any:
    try:
        return await outcome if inspect.isawaitable(outcome) else outcome
    except BaseException as error:  # noqa: BLE001
        return _Raised(error)


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _end_with_parent(sock: socket.socket, parent: int) -> None:
    """End this process and all it started when the parent is gone, also while a reward function never returns."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    while not poll.poll(1000) and os.getppid() == parent:
        pass
    os.killpg(0, signal.SIGKILL)


class _Answers:
    """Sends answers, from both threads, and keeps the event loop that async functions run on."""

    def __init__(self, sock: socket.socket, parts: Parts) -> None:
        self.sock = sock
        self.of_one: Parts = [part for part in parts if not is_of_group(part[1])]
        self.of_group: Parts = [part for part in parts if is_of_group(part[1])]
        self.sending = threading.Lock()
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def send(self, number: int, answer: Score | list[Score] | None) -> None:
        """Answer for a trajectory or group; None says that it is being scored from now on."""
        sys.stdout.flush()
        with self.sending:
            send(self.sock, pickle.dumps((number, answer)))

    def score(self, number: int, subject: Trajectory | Group) -> None:
        """Score, and answer: at once, or when what was async is done."""
        self.send(number, None)
        started = time.monotonic()
        outcomes = called(subject, self._parts(subject))
        if any(inspect.isawaitable(outcome) for outcome in outcomes):
            self.loop.call_soon_threadsafe(self._start, number, subject, outcomes, started)
        else:
            self.send(number, self._summed(subject, outcomes, started))

    def _parts(self, subject: Trajectory | Group) -> Parts:
        return self.of_group if isinstance(subject, Group) else self.of_one

    def _summed(self, subject: Trajectory | Group, outcomes: list[Any], started: float) -> Score | list[Score]:
        seconds = time.monotonic() - started
        if isinstance(subject, Group):
            return summed_per_member(subject, self.of_group, outcomes, seconds)
        return summed(self.of_one, outcomes, seconds)

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
        except asyncio.CancelledError:  # the service gave up on it, and waits to hear that it ended
            answer = Score(None, error="cancelled")
        del self.tasks[number]
        self.send(number, answer)


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with_parent, args=(sock, int(sys.argv[2])), daemon=True).start()
    parts: Parts = []
    try:
        for spec in pickle.loads(receive(sock)):
            function = find_reward(spec.function)
            check_params(function, f"reward '{spec.function}'", spec.params)
            parts.append((spec, function))
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
        # The service kills sooner. This is for an orphan whose function holds the interpreter's lock, so that the
        # thread above never runs.
        faulthandler.dump_traceback_later(limit, exit=True)
        answers.score(number, subject)
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    # Pickles name this module as the service imports it.
    from rewards.scoring import worker

    worker.main()
