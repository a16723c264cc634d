"""The rollout workers as Ray actors, and the arguments of their engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from configs.blocks.rl import Model, Reward
from orchestration.cluster.cpu_cores import bind_to
from orchestration.cluster.devices import DeviceSpec
from orchestration.cluster.heartbeat import IDLE, Activity, Heartbeat
from orchestration.cluster.job_shape import EngineJob
from orchestration.cluster.processes import lead_own_group
from orchestration.cluster.watchdog import Died
from orchestration.run.logs import redirect_output_to
from rollouts.vllm.engine import InFlight, LoadReport, Sequences, VLLMEngine
from rollouts.vllm.load_stamp import LoadStamp
from rollouts.worker import RolloutWorker

Worker = TypeVar("Worker", bound="RolloutActor")
P = ParamSpec("P")
R = TypeVar("R")


def duty(
    doing: str | None = None,
) -> Callable[
    [Callable[Concatenate[Worker, P], Coroutine[Any, Any, R]]], Callable[Concatenate[Worker, P], Coroutine[Any, Any, R]]
]:
    """Mark an actor's method: while it runs, the heartbeat says that the actor is `doing` this (None: it is part of
    generating). An error in it that comes from the death of vLLM's process is raised as Died."""

    def marked(
        method: Callable[Concatenate[Worker, P], Coroutine[Any, Any, R]],
    ) -> Callable[Concatenate[Worker, P], Coroutine[Any, Any, R]]:
        @wraps(method)
        async def watched(self: Worker, *args: P.args, **options: P.kwargs) -> R:
            try:
                with self.doing(doing.format(*args)) if doing else nullcontext():
                    return await method(self, *args, **options)
            except Exception as error:
                how = self.engine.death()
                if how is not None:
                    raise Died(how) from error
                raise

        return watched

    return marked


class RolloutActor(RolloutWorker):
    """A rollout worker in a process of its own, whose output goes to a log file of the run."""

    def __init__(
        self, log_file: str, engine: dict[str, Any], tokenizer: Model, reward: Reward, environment: str,
        cores: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """Construct the worker. cores: those to which it is bound; see CorePlan."""
        bind_to(cores)
        lead_own_group()
        redirect_output_to(log_file)
        self._pulse = Activity()
        self._duty = "constructing"  # what it does beside generating
        self._loaded = LoadStamp()
        self._moved = (0, 0, 0, 0.0)  # tokens, responses, groups, and when weights last came; when last looked at
        self._moves = 0
        self._is_started = False
        super().__init__(VLLMEngine(**engine), tokenizer, reward, environment)
        self.engine.environment |= self._loaded.environment
        self._still_since = self._unpaused_seconds()
        self._duty = ""

    @duty("start")
    async def start(self) -> None:
        await super().start()
        self._is_started = True

    collect = duty()(RolloutWorker.collect)
    probe = duty("probe")(RolloutWorker.probe)

    @duty("load weights of version {}")
    async def load_weights(
        self, version: int, update: dict[str, Any], in_flight: InFlight = "recompute", to_score: Sequences = ()
    ) -> LoadReport:
        return await self.engine.load_weights(version, update, in_flight, to_score)

    @duty("join the weight group")
    async def join_transfer(self, group: dict[str, Any]) -> None:
        await self.engine.join_transfer(group)

    @duty()
    async def drain(self) -> None:
        await self.engine.drain()

    @duty("sleep")
    async def sleep(self) -> None:
        await self.engine.sleep()

    @duty("wake")
    async def wake(self) -> None:
        await self.engine.wake()

    async def heartbeat(self) -> Heartbeat:
        """Return how the engine is. It is still when it should generate but makes no token, or when it loads but no
        tensor comes. Scoring has time-outs of its own."""
        if (how := self.engine.death()) is not None:
            raise Died(how)
        tokens = self.engine.tokens_generated() if self._is_started else 0
        moved = (tokens, self._responses.running, self._groups.running, self._loaded.seconds)
        is_still = moved == self._moved and (self._duty or self._responses.running)
        if not is_still:
            self._moved, self._moves, self._still_since = moved, self._moves + 1, self._clock()
        generating = f"generate, {moved[1]} responses under way" if moved[1] else ""
        scoring = f"score, {moved[2]} groups under way" if moved[2] else ""
        phase = self._duty or generating or scoring or IDLE
        return self._pulse.heartbeat_of(phase, self._clock() - self._still_since, self._moves)

    def _clock(self) -> float:
        """Return a clock, in seconds, that runs while the actor should move; pauses count only when it has a duty."""
        return time.monotonic() if self._duty else self._unpaused_seconds()

    @contextmanager
    def doing(self, duty: str) -> Iterator[None]:
        before, self._duty = self._duty, duty
        self._still_since = self._clock()
        try:
            yield
        finally:
            self._duty = before
            self._still_since = self._clock()


def engine_arguments(job: EngineJob, device: DeviceSpec, seed: int, threads: int) -> dict[str, Any]:
    """Return the arguments for constructing a VLLMEngine."""
    return {
        "model_path": job.model.path,
        "dtype": job.model.dtype,
        "device": device.device,
        "tensor_parallel_size": job.tensor_parallel_size,
        "max_model_len": job.max_model_len,
        "seed": seed,
        "threads": threads,
        "trust_remote_code": job.model.trust_remote_code,
        "lora_rank": job.lora_rank,
        "engine": job.arguments,
    }
