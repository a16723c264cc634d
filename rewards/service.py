"""Scoring in processes of its own: a reward that hangs is killed, one that fails is an error and never a silent 0.

The processes are started afresh (no fork: parents hold torch and vLLM) and end by themselves when the parent does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from configs.schema import Reward
from rewards.find import labels
from rewards.worker import PartSpec, Score, receive, send
from rollouts.records import Trajectory

START_SECONDS = 60.0  # for importing the reward functions


def part_specs(reward: Reward) -> list[PartSpec]:
    """The parts with labels: the function's name, numbered from its second use on."""
    names = labels([part.function for part in reward.parts])
    return [PartSpec(n, p.function, p.weight, dict(p.params)) for n, p in zip(names, reward.parts, strict=True)]


class ScoringService:
    """`workers` scoring processes. Each scores one trajectory at a time; the others wait their turn.

    `await start()` before the first `score`, `await close()` at the end.
    """

    def __init__(self, reward: Reward) -> None:
        self.reward = reward
        self._specs = pickle.dumps(part_specs(reward))
        self._names = ", ".join(part.function for part in reward.parts)
        # None stands for a process that is to be started when its turn comes.
        self._idle: queue.SimpleQueue[_Process | None] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(reward.workers, thread_name_prefix="scoring")
        self._running: set[_Process] = set()
        self._closed = False

    async def start(self) -> None:
        """Start all processes and import the reward functions in them.

        Raises:
            ValueError: a function does not import; the message says which.
        """
        loop = asyncio.get_running_loop()
        starts = [loop.run_in_executor(self._threads, self._start_process) for _ in range(self.reward.workers)]
        try:
            for process in await asyncio.gather(*starts):
                self._idle.put(process)
        except BaseException:
            await self.close()
            raise

    async def score(self, trajectory: Trajectory) -> Trajectory:
        """Fill in the trajectory's reward, reward_parts, reward_error and reward_seconds, and return it.

        Never raises for what a reward function does: an exception, a time-out, a dead process or an answer that is no
        number becomes `reward_error`, and the reward None (or 0 with `on_error: zero`). Inf and NaN are numbers: they
        become the reward, and the update deals with them.
        """
        assert not self._closed, "the scoring service is closed"
        result = await asyncio.get_running_loop().run_in_executor(self._threads, self._score, trajectory)
        failed = result.error is not None
        trajectory.reward = 0.0 if failed and self.reward.on_error == "zero" else result.reward
        trajectory.reward_parts = result.parts
        trajectory.reward_error = result.error
        trajectory.reward_seconds = result.seconds
        return trajectory

    async def close(self) -> None:
        """Kill the processes. Safe to call twice."""
        self._closed = True
        for process in list(self._running):
            process.kill()
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)
        for process in list(self._running):  # started while the others were killed
            process.kill()
        self._running.clear()

    def _start_process(self) -> _Process:
        if self._closed:
            raise ValueError("the scoring service is closed")
        process = _Process(self._names, 2 * self.reward.timeout_seconds + 10)
        self._running.add(process)
        try:
            process.prepare(self._specs)
        except BaseException:
            self._discard(process)
            raise
        return process

    def _discard(self, process: _Process) -> None:
        process.kill()
        self._running.discard(process)

    def _score(self, trajectory: Trajectory) -> Score:
        """One trajectory through one process. Runs in a thread of the pool, which has as many as there are processes."""
        process: _Process | None = self._idle.get_nowait()
        try:
            if process is None:
                process = self._start_process()
            return process.score(trajectory, self.reward.timeout_seconds)
        except _Lost as lost:
            # The process is gone or no longer to be trusted; the next trajectory gets a new one.
            if process is not None:
                self._discard(process)
                process = None
            return Score(None, error=str(lost), seconds=lost.seconds)
        except ValueError as error:
            return Score(None, error=f"{self._names}: the scoring process did not start again: {error}")
        finally:
            self._idle.put(process)


class _Lost(Exception):
    """The scoring process did not answer; it must be replaced."""

    def __init__(self, message: str, seconds: float = 0.0) -> None:
        super().__init__(message)
        self.seconds = seconds


class _Process:
    """One scoring process and the socket to it. Blocking; used by one thread at a time."""

    def __init__(self, names: str, limit_seconds: float) -> None:
        self.names = names
        self.socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", "rewards.worker", str(theirs.fileno()), str(os.getpid()), str(limit_seconds)]
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

    def prepare(self, specs: bytes) -> None:
        """Have it import the functions. Raises ValueError when that fails."""
        try:
            error = pickle.loads(self._call(specs, START_SECONDS))
        except _Lost as lost:
            raise ValueError(f"reward {self.names}: importing it failed: {lost}") from lost
        if error is not None:
            raise ValueError(error)

    def score(self, trajectory: Trajectory, timeout_seconds: float) -> Score:
        try:
            message = pickle.dumps(trajectory, protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            return Score(None, error=f"{self.names}: the trajectory cannot be sent to the scoring process: {error}")
        answer: Any = pickle.loads(self._call(message, timeout_seconds))
        assert isinstance(answer, Score)
        return answer

    def _call(self, message: bytes, timeout_seconds: float) -> bytes:
        """Send a message and wait for the answer. Raises _Lost when none comes in time or ever."""
        self.socket.settimeout(timeout_seconds)
        try:
            send(self.socket, message)
            return receive(self.socket)
        except TimeoutError as error:
            text = f"{self.names}: no answer within {timeout_seconds:g} s; its process was killed"
            raise _Lost(text, timeout_seconds) from error
        except (EOFError, OSError) as error:
            raise _Lost(f"{self.names}: its process died ({self._how_it_ended()})") from error

    def _how_it_ended(self) -> str:
        try:
            code = self.popen.wait(5)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """SIGKILL to the process and everything it started; returns when it is gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it is gone already
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        # shutdown wakes a thread that is waiting on the socket; close alone does not.
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
