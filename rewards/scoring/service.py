"""Score responses in separate processes: a reward that hangs is killed, and one that fails is an error, never a silent
0.

The processes are not forked, because their parent holds torch and vLLM. They end by themselves when the parent ends.
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
from plugins.kinds import labels
from records.rollout import Group, Trajectory
from rewards.scoring.worker import LENGTH, PartSpec, Score

START_SECONDS = 60.0  # limit for importing the reward functions
FIRST_TRIES = 3  # after so many processes in a row without an answer, further ones get the ordinary limit
LIMIT = "reward.timeout_seconds"
FIRST_LIMIT = "reward.first_timeout_seconds, for a process's first score and what it loads"
CANCEL_SECONDS = 1.0  # limit for a cancelled async function to end
NOT_SCORED_AS_GROUP = "a part of the reward is of the whole group, and the group was not scored"


def part_specs(reward: Reward) -> list[PartSpec]:
    """Return the parts with labels: the function's name, numbered from its second use on."""
    names = labels([part.function for part in reward.parts])
    return [PartSpec(n, p.function, p.weight, dict(p.params)) for n, p in zip(names, reward.parts, strict=True)]


class ScoringService:
    """Run `reward.workers` scoring processes.

    A process scores one trajectory at a time, or up to `reward.concurrency` when a function is async; the others wait.
    Call `await start()` before the first `score` and `await close()` at the end, all on one event loop.
    """

    def __init__(self, reward: Reward) -> None:
        self.reward = reward
        self._specs = pickle.dumps(part_specs(reward))
        self._names = ", ".join(part.function for part in reward.parts)
        self._free_slots: asyncio.Queue[_Slot] = asyncio.Queue()  # a slot is in it as often as it has room
        self._slots = [_Slot() for _ in range(reward.workers)]
        # Trajectories that shared a lost process with others, or whose process died, are scored once more here, one at
        # a time: then no other trajectory can be to blame, and something from outside will hardly kill a process twice.
        self._alone, self._alone_turn = _Slot(), asyncio.Lock()
        self._has_group_part = False
        self._first_limit = max(reward.first_timeout_seconds, reward.timeout_seconds)
        self._lost_first = 0  # how many processes in a row were killed before their first answer
        self._closed = False

    async def start(self) -> None:
        """Start all processes and import the reward functions in them.

        Raises:
            ValueError: a function cannot be imported; the message says which.
        """
        try:
            processes = await asyncio.gather(*map(self._process, self._slots))
        except BaseException:
            await self.close()
            raise
        self._has_group_part = processes[0].has_group_part
        for _ in range(self.reward.concurrency if processes[0].has_async else 1):
            for slot in self._slots:
                self._free_slots.put_nowait(slot)

    async def score(self, trajectory: Trajectory) -> Trajectory:
        """Fill in the trajectory's reward, reward_parts, reward_error and reward_seconds, and return it.

        Nothing that a reward function does raises here. An exception, a time-out, a dead process or an answer that is
        no finite number becomes `reward_error`, and the reward becomes None (or 0 with `on_error: zero`).
        """
        assert not self._closed, "the scoring service is closed"
        result = await self._score(trajectory)
        assert isinstance(result, Score), "a trajectory has one score"
        trajectory.reward, trajectory.reward_error = self._paid(result)
        trajectory.reward_parts = result.parts
        trajectory.reward_seconds = result.seconds
        if self._has_group_part and result.error is None:
            trajectory.reward_error = NOT_SCORED_AS_GROUP
        return trajectory

    async def score_group(self, group: Group) -> Group:
        """Add to the group's rewards what the parts of the whole group pay, if there are such parts, and return it.

        The trajectories were scored before; those whose scoring failed stay as they are. Nothing that a reward function
        does raises here.
        """
        waiting = [t.reward_error == NOT_SCORED_AS_GROUP for t in group.trajectories]
        if not any(waiting):
            return group
        for trajectory, is_waiting in zip(group.trajectories, waiting, strict=True):
            if is_waiting:
                trajectory.reward_error = None
        result = await self._score(group)
        scores = [result] * len(group.trajectories) if isinstance(result, Score) else result
        for trajectory, score, is_waiting in zip(group.trajectories, scores, waiting, strict=True):
            if not is_waiting:
                continue
            own_reward = trajectory.reward
            assert own_reward is not None, "the other parts were scored without an error"
            trajectory.reward, trajectory.reward_error = self._paid(score)
            if score.reward is not None:
                trajectory.reward = own_reward + score.reward
            trajectory.reward_parts |= score.parts
            trajectory.reward_seconds += score.seconds / len(group.trajectories)
        return group

    def _paid(self, score: Score) -> tuple[float | None, str | None]:
        """Return reward and error."""
        failed = score.error is not None
        return 0.0 if failed and self.reward.on_error == "zero" else score.reward, score.error

    async def close(self) -> None:
        """Kill the processes. A second call does nothing."""
        self._closed = True
        for slot in (*self._slots, self._alone):
            if slot.process is not None:
                await slot.process.lose(f"{self._names}: the scoring service was closed")

    async def _score(self, subject: Trajectory | Group) -> Score | list[Score]:
        slot = await self._free_slots.get()
        try:
            return await self._score_in(slot, subject)
        except _Lost as lost:
            if not lost.may_be_innocent or self._closed:
                return Score(None, error=str(lost), seconds=lost.seconds)
        finally:
            self._free_slots.put_nowait(slot)
        async with self._alone_turn:
            try:
                return await self._score_in(self._alone, subject)
            except _Lost as lost:
                return Score(None, error=str(lost), seconds=lost.seconds)

    async def _score_in(self, slot: _Slot, subject: Trajectory | Group) -> Score | list[Score]:
        try:
            process = await self._process(slot)
        except ValueError as error:
            return Score(None, error=f"{self._names}: the scoring process could not be started again: {error}")
        is_first = not process.has_answered and self._lost_first < FIRST_TRIES
        limit = self._first_limit if is_first else self.reward.timeout_seconds
        try:
            result = await process.score(subject, limit, FIRST_LIMIT if is_first else LIMIT)
        except _Lost as lost:
            self._lost_first += is_first and lost.seconds >= limit
            raise
        self._lost_first = 0
        return result

    async def _process(self, slot: _Slot) -> _Process:
        """Return the slot's process; start one when there is none or it was lost."""
        async with slot.starting:
            if self._closed:
                raise ValueError("the scoring service is closed")
            if slot.process is None or slot.process.is_lost:
                slot.process = _Process(self._names, 2 * self._first_limit + 10)
                await slot.process.prepare(self._specs)
            return slot.process


class _Slot:
    """The place of a scoring process, which may be replaced."""

    def __init__(self) -> None:
        self.process: _Process | None = None
        self.starting = asyncio.Lock()


class _Lost(Exception):
    """The scoring process gave no answer and must be replaced."""

    def __init__(self, message: str, seconds: float, may_be_innocent: bool) -> None:
        super().__init__(message)
        self.seconds = seconds
        self.may_be_innocent = may_be_innocent  # something other than this trajectory may be to blame


class _Process:
    """One scoring process and the socket to it."""

    def __init__(self, names: str, limit_seconds: float) -> None:
        self.names = names
        self.is_lost = self.has_answered = False
        self.has_async = self.has_group_part = False
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Score | list[Score]]] = {}
        self._started: dict[int, float] = {}  # when the process began with each; one may have to wait for others there
        self._last_message = time.monotonic()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None  # kept here, since the event loop holds tasks weakly
        self.socket, worker_socket = socket.socketpair()
        command = [
            sys.executable,
            "-m",
            "rewards.scoring.worker",
            str(worker_socket.fileno()),
            str(os.getpid()),
            str(limit_seconds),
        ]
        # The worker has this process's import path, as absolute folders, and one thread.
        path = os.pathsep.join(os.path.abspath(p) for p in sys.path)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with worker_socket:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward prints goes where this process's errors go
                pass_fds=[worker_socket.fileno()],
                env={**os.environ, "PYTHONPATH": path, **threads},
                start_new_session=True,  # in its own group, Ctrl-C does not reach it, and it dies with its children
            )

    async def prepare(self, specs: bytes) -> None:
        """Let the process import the functions.

        Raises:
            ValueError: a function cannot be imported.
        """
        self._reader, self._writer = await asyncio.open_connection(sock=self.socket)
        self._send(specs)
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

    async def score(self, subject: Trajectory | Group, timeout_seconds: float, limit: str) -> Score | list[Score]:
        """Return the scores of a trajectory or group; without an answer in time, kill the process and raise _Lost.

        limit: the key that sets timeout_seconds, for the message.
        """
        try:
            message = pickle.dumps((number := next(self._numbers), subject), protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            return Score(None, error=f"{self.names}: the trajectory cannot be sent to the scoring process: {error}")
        if self.is_lost:
            raise _Lost(f"{self.names}: its process is gone", 0.0, may_be_innocent=True)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        sent = time.monotonic()
        self._send(message)
        try:
            # The limit counts from when the process began with this one. Until then, any message from it renews the
            # limit.
            while (
                seconds := self._started.get(number, max(sent, self._last_message)) + timeout_seconds - time.monotonic()
            ) > 0:
                await asyncio.wait({answer}, timeout=seconds)
                if answer.done():
                    return answer.result()
            text = f"{self.names}: no answer within {timeout_seconds:g} s ({limit})"
            if len(self._open) > 1:
                self._send(pickle.dumps((number, None)))
                if (await asyncio.wait({answer}, timeout=CANCEL_SECONDS))[0] and answer.exception() is None:
                    return Score(None, error=f"{text}; it was cancelled", seconds=timeout_seconds)
            # A process that was frozen from outside, or that never began with this trajectory, says nothing about it.
            may_be_innocent = number not in self._started or self._is_frozen()
            await self.lose(f"{text}; its process was killed", timeout_seconds, may_be_innocent)
            return answer.result()
        except asyncio.CancelledError:
            # Nobody waits for the answer any more, but the process could work on it for ever.
            answer.cancel()
            await self.lose(f"{self.names}: scoring was cancelled, and its process killed")
            raise
        finally:
            del self._open[number]
            self._started.pop(number, None)

    async def lose(self, message: str, seconds: float = 0.0, may_be_innocent: bool = False) -> None:
        """Kill the process and its children, let all who wait for it get _Lost, and wait until it is gone.

        A trajectory is also taken for possibly innocent when it was not alone in the process.
        """
        self.is_lost = True
        may_be_innocent = may_be_innocent or len(self._open) > 1
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(_Lost(message, seconds, may_be_innocent))
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it is gone already
            os.killpg(self.popen.pid, signal.SIGKILL)
        if self._writer is not None:
            self._writer.transport.abort()
        self.socket.close()
        await asyncio.to_thread(self.popen.wait)

    async def _listen(self) -> None:
        try:
            while True:
                number, score = await self._message()
                self._last_message = time.monotonic()
                if number not in self._open:
                    continue
                if score is None:
                    self._started[number] = self._last_message
                elif not self._open[number].done():
                    self.has_answered = True
                    self._open[number].set_result(score)
        except (EOFError, OSError):
            if not self.is_lost:
                await self.lose(f"{self.names}: its process died ({await self._how_it_ended()})", may_be_innocent=True)

    def _send(self, message: bytes) -> None:
        assert self._writer is not None, "`prepare` comes before `score`"
        self._writer.write(LENGTH.pack(len(message)) + message)

    async def _message(self) -> Any:
        """Return the next message; raise EOFError (IncompleteReadError is one) or OSError when the process is gone."""
        assert self._reader is not None, "`prepare` connects first"
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return pickle.loads(await self._reader.readexactly(length))

    def _is_frozen(self) -> bool:
        """Return whether the process is stopped by a signal."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.popen.pid).status() == psutil.STATUS_STOPPED
        return False

    async def _how_it_ended(self) -> str:
        try:
            code = await asyncio.to_thread(self.popen.wait, 5)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
