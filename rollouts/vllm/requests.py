"""The requests of one vLLM engine, and the number of tokens they made."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from records.rollout import FloatArray, IntArray
from rollouts.vllm import internals
from rollouts.vllm.busy_timer import BusyTimer
from rollouts.vllm.response import Response

FIRST = -1  # before every other priority: scoring, which checks a version, does not wait for responses


@dataclasses.dataclass(frozen=True)
class Request:
    """A request that was submitted to vLLM."""

    response: Response  # what earlier requests made of it
    answer: Any  # vLLM's
    state: Any  # vLLM's record, which it updates, also when it ends the request

    @property
    def tokens(self) -> int:
        """Return how many tokens this request has made so far."""
        return internals.tokens_made(self.state)


class Requests:
    """All requests of one engine. A request runs from `submit` to the end of `outcome`."""

    def __init__(self, llm: Any, adapter: Any, pauses: BusyTimer) -> None:
        """Begin without requests. llm: vLLM's engine. adapter: what requests name to use the policy's adapter; None in
        an engine without adapters. pauses: runs while nothing can be generated."""
        self._llm, self._adapter, self._pauses = llm, adapter, pauses
        self._numbers = itertools.count()
        self._idle = asyncio.Event()
        self._tokens_ended = 0  # made by requests that do not run any more
        self._drained_seconds: float | None = None  # how long draining took; the door has been closed since
        self.door = asyncio.Lock()  # requests begin one by one, and none begins while weights come
        self.running: dict[str, Request] = {}
        self.cache_epoch = 0  # how often new weights came and cached keys and values of older ones stayed

    async def submit(self, response: Response, parameters: Any, priority: int) -> str:
        """Let vLLM begin or continue a response; return the request's name."""
        name = f"{next(self._numbers)}"
        salt = f"{self.cache_epoch}"  # keys and values of older weights are not shared with this request
        answer = await internals.submit_request(
            self._llm, name, response.context(), parameters, self._adapter, priority, salt
        )
        self.running[name] = Request(response, answer, internals.request_state(self._llm, answer))
        self._idle.clear()
        return name

    async def outcome(self, name: str) -> Any:
        """Wait until a request has ended and return what it made. When this call is cancelled, cancel the request."""
        try:
            return (await self.running[name].answer.get()).outputs[0]
        except BaseException:
            await self._llm.abort(name)
            raise
        finally:
            self._tokens_ended += self.running.pop(name).tokens
            if not self.running:
                self._idle.set()

    async def submit_scoring(self, prompt_ids: IntArray, token_ids: IntArray) -> Coroutine[Any, Any, FloatArray]:
        """Let vLLM score tokens after a prompt at temperature 1, before all waiting requests, without cached keys and
        values. Return a coroutine that waits for the log-probabilities, [T] float32.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        scored, name = token_ids.tolist(), f"{next(self._numbers)}"
        answer = await internals.submit_request(
            self._llm, name, prompt_ids.tolist() + scored, parameters, self._adapter, FIRST
        )

        async def logprobs() -> FloatArray:
            rows = (await answer.get()).prompt_logprobs[len(prompt_ids) :]
            return np.asarray([row[token].logprob for row, token in zip(rows, scored, strict=True)], dtype=np.float32)

        return logprobs()

    async def cancel(self, unbegun_only: bool = False) -> None:
        """End running requests; their outcomes are what they made so far, with finish reason "abort".

        unbegun_only: only those without a token so far.
        """
        await self._llm.abort([name for name, one in self.running.items() if not (unbegun_only and one.tokens)])

    @property
    def are_drained(self) -> bool:
        return self._drained_seconds is not None

    async def drain(self) -> None:
        """Let running requests end, and let none begin until `held_back` was left. A second call does nothing."""
        if self.are_drained:
            return
        await self.door.acquire()
        try:
            started = time.perf_counter()
            await self.cancel(unbegun_only=True)
            if self.running:
                await self._idle.wait()
            self._drained_seconds = time.perf_counter() - started
            self._pauses.begin()  # whatever waits at the door from here on could have been generated
        except BaseException:
            self.door.release()
            raise

    @asynccontextmanager
    async def held_back(self) -> AsyncIterator[float]:
        """Let no request begin during the block. Yield how many seconds running ones were drained for before, or 0."""
        if not self.are_drained:
            await self.door.acquire()
        try:
            yield self._drained_seconds or 0.0
        finally:
            if self.are_drained:
                self._drained_seconds = None
                self._pauses.end()
            self.door.release()

    def response_tokens(self) -> list[int]:
        """Return the lengths so far of the running responses that have begun."""
        return [tokens for one in self.running.values() if (tokens := len(one.response) + one.tokens)]

    def tokens_generated(self) -> int:
        """Return how many tokens all requests have made, with those of running requests so far."""
        return self._tokens_ended + sum(one.tokens for one in self.running.values())

    def count_from_now(self) -> None:
        """Forget the tokens of requests that have ended."""
        self._tokens_ended = 0
