"""Scoring in processes of its own: a reward that hangs is killed, one that fails is an error and never a silent 0.

The processes are started afresh (no fork: parents hold torch and vLLM) and end by themselves when the parent does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import psutil

from configs.blocks.rl import Reward
from plugins.lookup import labels
from records.rollout import Group, Trajectory
from rewards.scoring.worker import LENGTH, PartSpec, Score

START_SECONDS = 60.0  # for importing the reward functions
CANCEL_SECONDS = 1.0  # for a cancelled async function to end
UNPAID = "a part of the reward is of the whole group, and the group was not scored"


def part_specs(reward: Reward) -> list[PartSpec]:
    """The parts with labels: the function's name, numbered from its second use on."""
    names = labels([part.function for part in reward.parts])
    return [PartSpec(n, p.function, p.weight, dict(p.params)) for n, p in zip(names, reward.parts, strict=True)]


class ScoringService:
    """`workers` scoring processes, each working on up to `concurrency` trajectories when a function is async, else on
    one; the others wait their turn.

    `await start()` before the first `score`, `await close()` at the end, all on one event loop.
    """

    def __init__(self, reward: Reward) -> None:
        self.reward = reward
        self._specs = pickle.dumps(part_specs(reward))
        self._names = ", ".join(part.function for part in reward.parts)
        self._places: asyncio.Queue[_Slot] = asyncio.Queue()  # a slot is in it as often as it has room
        self._slots = [_Slot() for _ in range(reward.workers)]
        # For those that were in a process with others when it was lost, or whose process died: here nobody else can be to
        # blame, and a process that something outside has killed will hardly be killed twice.
        self._alone, self._alone_turn = _Slot(), asyncio.Lock()
        self._has_group_part = False
        self._closed = False

    async def start(self) -> None:
        """Start all processes and import the reward functions in them.

        Raises:
            ValueError: a function does not import; the message says which.
        """
        try:
            processes = await asyncio.gather(*map(self._process, self._slots))
        except BaseException:
            await self.close()
            raise
        self._has_group_part = processes[0].has_group_part
        for _ in range(self.reward.concurrency if processes[0].has_async else 1):
            for slot in self._slots:
                self._places.put_nowait(slot)

    async def score(self, trajectory: Trajectory) -> Trajectory:
        """Fill in the trajectory's reward, reward_parts, reward_error and reward_seconds, and return it.

        Never raises for what a reward function does: an exception, a time-out, a dead process or an answer that is no
        number becomes `reward_error`, and the reward None (or 0 with `on_error: zero`). Inf and NaN are numbers: they
        become the reward, and the update deals with them.
        """
        assert not self._closed, "the scoring service is closed"
        result = await self._score(trajectory)
        assert isinstance(result, Score), "a trajectory has one score"
        trajectory.reward, trajectory.reward_error = self._paid(result)
        trajectory.reward_parts = result.parts
        trajectory.reward_seconds = result.seconds
        if self._has_group_part and result.error is None:
            trajectory.reward_error = UNPAID
        return trajectory

    async def score_group(self, group: Group) -> Group:
        """Add what the parts of the whole group pay, and return it; nothing when there are none.

        Its trajectories were scored before. Those whose scoring failed stay as they are. Never raises, as `score`.
        """
        waiting = [t.reward_error == UNPAID for t in group.trajectories]
        if not any(waiting):
            return group
        for trajectory in group.trajectories:
            trajectory.reward_error = None if trajectory.reward_error == UNPAID else trajectory.reward_error
        result = await self._score(group)
        scores = [result] * len(group.trajectories) if isinstance(result, Score) else result
        for trajectory, score, is_open in zip(group.trajectories, scores, waiting, strict=True):
            if not is_open:
                continue
            so_far = trajectory.reward
            assert so_far is not None, "the other parts were scored without an error"
            trajectory.reward, trajectory.reward_error = self._paid(score)
            if score.reward is not None:
                trajectory.reward = so_far + score.reward
            trajectory.reward_parts |= score.parts
            trajectory.reward_seconds += score.seconds / len(group.trajectories)
        return group

    def _paid(self, score: Score) -> tuple[float | None, str | None]:
        """Reward and error."""
        failed = score.error is not None
        return 0.0 if failed and self.reward.on_error == "zero" else score.reward, score.error

    async def close(self) -> None:
        """Kill the processes. Safe to call twice."""
        self._closed = True
        for slot in (*self._slots, self._alone):
            if slot.process is not None:
                await slot.process.lose(f"{self._names}: the scoring service was closed")

    async def _score(self, subject: Trajectory | Group) -> Score | list[Score]:
        slot = await self._places.get()
        try:
            return await self._score_in(slot, subject)
        except _Lost as lost:
            if not lost.is_worth_another or self._closed:
                return Score(None, error=str(lost), seconds=lost.seconds)
        finally:
            self._places.put_nowait(slot)
        async with self._alone_turn:
            try:
                return await self._score_in(self._alone, subject)
            except _Lost as lost:
                return Score(None, error=str(lost), seconds=lost.seconds)

    async def _score_in(self, slot: _Slot, subject: Trajectory | Group) -> Score | list[Score]:
        try:
            process = await self._process(slot)
        except ValueError as error:
            return Score(None, error=f"{self._names}: the scoring process did not start again: {error}")
        return await process.score(subject, self.reward.timeout_seconds)

    async def _process(self, slot: _Slot) -> _Process:
        """The slot's process; a new one when it has none or lost it."""
        async with slot.starting:
            if self._closed:
                raise ValueError("the scoring service is closed")
            if slot.process is None or slot.process.is_lost:
                slot.process = _Process(self._names, 2 * self.reward.timeout_seconds + 10)
                await slot.process.prepare(self._specs)
            return slot.process


class _Slot:
    """The place of a scoring process, which may be replaced."""

    def __init__(self) -> None:
        self.process: _Process | None = None
        self.starting = asyncio.Lock()


class _Lost(Exception):
    """The scoring process did not answer; it must be replaced."""

    def __init__(self, message: str, seconds: float, is_worth_another: bool) -> None:
        super().__init__(message)
        self.seconds = seconds
        self.is_worth_another = is_worth_another  # it is not known that this trajectory is to blame


class _Process:
    """One scoring process and the socket to it."""

    def __init__(self, names: str, limit_seconds: float) -> None:
        self.names = names
        self.is_lost = False
        self.has_async = self.has_group_part = False
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Score | list[Score]]] = {}
        self._started: dict[int, float] = {}  # when the process began with each; they may wait for one another there
        self._heard = time.monotonic()
        self.socket, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-m",
            "rewards.scoring.worker",
            str(theirs.fileno()),
            str(os.getpid()),
            str(limit_seconds),
        ]
        # The same import path as here, in whatever folder this process runs; one thread per process.
        path = os.pathsep.join(os.path.abspath(p) for p in sys.path)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with theirs:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward prints goes where this process's errors go
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path, **threads},
                start_new_session=True,  # its own group: Ctrl-C does not reach it, and it dies with what it started
            )

    async def prepare(self, specs: bytes) -> None:
        """Have it import the functions. Raises ValueError when that fails."""
        self._reader, self._writer = await asyncio.open_connection(sock=self.socket)
        self._writer.write(LENGTH.pack(len(specs)) + specs)
        try:
            error, self.has_async, self.has_group_part = await asyncio.wait_for(self._message(), START_SECONDS)
        except TimeoutError:
            error = f"reward {self.names}: importing it took longer than {START_SECONDS:g} s"
        except (EOFError, OSError):
            error = f"reward {self.names}: importing it failed: its process died ({await self._how_it_ended()})"
        if error is not None:
            await self.lose(error)
            raise ValueError(error)
        self._listening = asyncio.create_task(self._listen())

    async def score(self, subject: Trajectory | Group, timeout_seconds: float) -> Score | list[Score]:
        """Raises _Lost when the process is gone or no longer to be trusted; it is killed then."""
        try:
            message = pickle.dumps((number := next(self._numbers), subject), protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            return Score(None, error=f"{self.names}: the trajectory cannot be sent to the scoring process: {error}")
        if self.is_lost:
            raise _Lost(f"{self.names}: its process is gone", 0.0, is_worth_another=True)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        sent = time.monotonic()
        self._writer.write(LENGTH.pack(len(message)) + message)
        try:
            # Its own time counts from when it was begun with; until then, any sign of life from the process will do.
            while (
                seconds := self._started.get(number, max(sent, self._heard)) + timeout_seconds - time.monotonic()
            ) > 0:
                await asyncio.wait({answer}, timeout=seconds)
                if answer.done():
                    return answer.result()
            text = f"{self.names}: no answer within {timeout_seconds:g} s"
            if len(self._open) > 1:
                message = pickle.dumps((number, None))
                self._writer.write(LENGTH.pack(len(message)) + message)
                if (await asyncio.wait({answer}, timeout=CANCEL_SECONDS))[0] and answer.exception() is None:
                    return Score(None, error=f"{text}; it was cancelled", seconds=timeout_seconds)
            # One that somebody else has frozen, or that never began, says nothing about this trajectory.
            is_not_to_blame = number not in self._started or self._is_frozen()
            await self.lose(f"{text}; its process was killed", timeout_seconds, died=is_not_to_blame)
            return answer.result()
        except asyncio.CancelledError:
            # Nobody waits for it any more, and it may be at work for ever.
            answer.cancel()
            await self.lose(f"{self.names}: scoring was cancelled, and its process killed")
            raise
        finally:
            del self._open[number]
            self._started.pop(number, None)

    async def lose(self, message: str, seconds: float = 0.0, died: bool = False) -> None:
        """Kill it and everything it started, and tell all who wait for it. Returns when it is gone. died: by itself, or
        killed or frozen by somebody else."""
        self.is_lost = True
        is_worth_another = died or len(self._open) > 1
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(_Lost(message, seconds, is_worth_another))
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it is gone already
            os.killpg(self.popen.pid, signal.SIGKILL)
        if hasattr(self, "_writer"):
            self._writer.transport.abort()
        self.socket.close()
        await asyncio.to_thread(self.popen.wait)

    async def _listen(self) -> None:
        try:
            while True:
                number, score = await self._message()
                self._heard = time.monotonic()
                if number not in self._open:
                    continue
                if score is None:
                    self._started[number] = self._heard
                elif not self._open[number].done():
                    self._open[number].set_result(score)
        except (EOFError, OSError):
            if not self.is_lost:
                await self.lose(f"{self.names}: its process died ({await self._how_it_ended()})", died=True)

    async def _message(self) -> Any:
        """The next message. Raises EOFError (IncompleteReadError is one) or OSError when the process is gone."""
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return pickle.loads(await self._reader.readexactly(length))

    def _is_frozen(self) -> bool:
        """Whether it is stopped by a signal."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.popen.pid).status() == psutil.STATUS_STOPPED
        return False

    async def _how_it_ended(self) -> str:
        try:
            code = await asyncio.to_thread(self.popen.wait, 5)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
