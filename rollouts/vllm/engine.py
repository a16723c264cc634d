"""The rollout engine: vLLM's asynchronous engine behind the few calls a rollout needs. Token-in, token-out.

`VLLMEngine` is a plain class: use it in a process, or inside a Ray actor. vLLM is imported on construction.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import numpy as np

from records.rollout import FloatArray, IntArray
from rollouts.vllm.busy_timer import Stopwatch
from rollouts.vllm.response import Generation, Response
from rollouts.vllm.sampling import Sampling
from rollouts.vllm.settings import check_arguments, cpu_arguments, cpu_environment, start_vllm

InFlight = Literal["recompute", "keep_cache", "drain", "abort"]
Sequences = Sequence[tuple[IntArray, IntArray]]  # prompts, and tokens after them
FIRST = -1  # of all priorities: what proves a version is not to wait for responses


class WeightLoadError(RuntimeError):
    """An engine did not take a version whole. It refuses to generate until a later version loads."""


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What loading weights did to the responses under way."""

    pause_seconds: float  # in which nothing could be generated
    drain_seconds: float  # before it, in which running responses were finished and none begun
    requests_in_flight: int  # with tokens already, when generation paused; all of them go on
    tokens_kept: int  # their tokens so far
    scored: list[FloatArray] = dataclasses.field(default_factory=list)  # [T] of every sequence that was to be scored


@dataclasses.dataclass(frozen=True)
class _Request:
    """A request that vLLM has."""

    response: Response  # what earlier requests made of it
    state: Any  # vLLM's, which it updates, also when it ends the request

    @property
    def tokens(self) -> int:
        """Made by this request so far."""
        made: int = self.state.detokenizer.num_output_tokens()
        return made


class VLLMEngine:
    """One vLLM engine. Concurrent `generate` calls are batched continuously by vLLM."""

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "bfloat16",
        device: str = "cpu",
        tensor_parallel_size: int = 1,
        max_model_len: int | None = None,
        seed: int = 0,
        threads: int = 0,
        trust_remote_code: bool = False,
        lora_rank: int | None = None,
        engine: dict[str, Any] | None = None,
    ) -> None:
        """Check and remember the settings; `start` starts vLLM.

        max_model_len: prompt and response tokens together; None: the model's own.
        seed: of the noise of unseeded requests; give every engine of a run its own, or they all draw the same.
        threads: of the CPU engine; 0: all cores this process may use.
        lora_rank: the engine takes adapters of this rank instead of whole models; it starts with one of zeros.
        engine: any arguments of vLLM's AsyncEngineArgs; they win over everything chosen here.

        Raises ValueError: an argument vLLM does not know.
        """
        self.arguments: dict[str, Any] = {
            "model": model_path,
            "dtype": dtype,
            "tensor_parallel_size": tensor_parallel_size,
            "max_model_len": max_model_len,
            "seed": seed,
            "trust_remote_code": trust_remote_code,
            # The log-probabilities of the distribution that was sampled from: after temperature, top-p and top-k.
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            # Of the requests that wait, those that may begin under the oldest version first: the trainer needs them first.
            "scheduling_policy": "priority",
            "worker_extension_cls": "rollouts.vllm.weight_receiver.ReceiverExtension",
            "weight_transfer_config": {"backend": "feynrl"},
            "disable_log_stats": True,
        }
        self.environment: dict[str, str] = {}
        if device == "cpu":
            self.arguments |= cpu_arguments(tensor_parallel_size)
            self.environment = cpu_environment(threads)
        self._lora_rank = lora_rank
        if lora_rank is not None:
            from rollouts.vllm.adapter_receiver import adapter_arguments

            self.arguments |= adapter_arguments(lora_rank)
        self.arguments |= engine or {}
        check_arguments(self.arguments)
        self._llm: Any = None
        self._adapter: Any = None  # vLLM's name of the policy's adapter
        self._version = 0
        self._unusable: str | None = None
        self._paused = False
        self._pauses = Stopwatch()
        self._numbers = itertools.count()
        self._running: dict[str, _Request] = {}
        self._idle = asyncio.Event()  # set when none is
        self._door = asyncio.Lock()  # requests begin one by one, and none while weights come
        self._drained_seconds: float | None = None  # it took so long, and the door has been closed since
        self._came = asyncio.Condition()  # told whenever weights came, or did not load
        self._aborts = 0  # calls of `abort`
        self._tokens_ended = 0  # of requests that are not under way any more
        self._cache_epoch = 0  # times that weights came and cached keys and values of older ones stayed

    async def start(self) -> None:
        """Load the model, start vLLM's processes and make one token, which compiles what vLLM compiles (10 to 30 s)."""
        self._llm = await asyncio.to_thread(start_vllm, self.arguments, self.environment)
        if self._lora_rank is not None:
            from rollouts.vllm.adapter_receiver import adapter_request

            self._adapter = adapter_request()
            await self._llm.collective_rpc("begin_adapter", args=(self._lora_rank,))
        await self.generate([0], Sampling(max_new_tokens=1), 0, "warm-up", 0)
        self._tokens_ended = 0  # nobody asked for that one

    async def generate(
        self,
        prompt_ids: Sequence[int] | IntArray,
        sampling: Sampling,
        step: int,
        prompt_id: str,
        sample: int,
        oldest_version: int = 0,
    ) -> Generation:
        """Sample one response to the prompt. step, prompt_id and sample only matter to a seeded sampling.

        oldest_version: begin under the weights of this version or a later one; waits for them.

        Raises WeightLoadError: the last weight update failed (also for requests that were running then).
        """
        async with self._came:
            await self._came.wait_for(lambda: self._version >= oldest_version or self._unusable)
        started = time.perf_counter()
        response, aborts = Response(prompt_ids, sampling), self._aborts
        while response.finish_reason == "abort":
            async with self._door:
                if self._unusable:
                    raise WeightLoadError(self._unusable)
                if self._aborts > aborts:
                    break
                asked = response.parameters(step, prompt_id, sample)
                request, answer = await self._begin(response, asked, priority=oldest_version)
            response.add(await self._end(request, answer), self._decode)
        if self._unusable:
            raise WeightLoadError(self._unusable)
        return response.generation(time.perf_counter() - started)

    async def _begin_score(self, prompt_ids: IntArray, token_ids: IntArray) -> Coroutine[Any, Any, FloatArray]:
        """Have vLLM score tokens that are given after a prompt, at temperature 1, before anything that waits; no cached key or
        value is used. Returns what waits for the log-probabilities, [T] float32."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        asked = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        given = token_ids.tolist()
        prompt = {"type": "token", "prompt_token_ids": prompt_ids.tolist() + given}
        answer = await self._llm.add_request(
            f"{next(self._numbers)}", prompt, asked, lora_request=self._adapter, priority=FIRST
        )

        async def found() -> FloatArray:
            rows = (await answer.get()).prompt_logprobs[len(prompt_ids) :]
            return np.asarray([row[token].logprob for row, token in zip(rows, given, strict=True)], dtype=np.float32)

        return found()

    async def _begin(self, response: Response, asked: Any, priority: int) -> tuple[str, Any]:
        """Hand a request to vLLM; returns its name and where its answer will be."""
        request = f"{next(self._numbers)}"
        prompt = {
            "type": "token",
            "prompt_token_ids": response.context(),
            "cache_salt": f"{self._cache_epoch}",  # of all requests with this beginning, only those with it share blocks
        }
        answer = await self._llm.add_request(request, prompt, asked, lora_request=self._adapter, priority=priority)
        self._running[request] = _Request(response, self._llm.output_processor.request_states[answer.request_id])
        self._idle.clear()
        return request, answer

    async def _end(self, request: str, answer: Any) -> Any:
        """What the request made, when it has ended. Aborts it when nobody waits any more."""
        try:
            return (await answer.get()).outputs[0]
        except BaseException:
            await self._llm.abort(request)
            raise
        finally:
            self._tokens_ended += self._running.pop(request).tokens
            if not self._running:
                self._idle.set()

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._llm.get_tokenizer().decode(token_ids, skip_special_tokens=True)
        return text

    async def abort(self) -> None:
        """End all running requests; each returns what it has, with finish reason "abort"."""
        self._aborts += 1
        await self._llm.abort(list(self._running))

    async def _cut(self, unbegun_only: bool) -> None:
        """Take requests back from vLLM (unbegun: without a token so far). `generate` hands them over again, with what
        they made, when the door opens."""
        await self._llm.abort([name for name, one in self._running.items() if not (unbegun_only and one.tokens)])

    async def pause(self) -> None:
        """Stop generating; running requests stay and new ones queue until `resume`."""
        if not self._paused:
            self._paused = True
            self._pauses.begin()
            await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """Generate again after `pause`."""
        if self._unusable:
            raise WeightLoadError(self._unusable)
        if self._paused:
            self._paused = False
            await self._llm.resume_generation()
            self._pauses.end()

    async def join_transfer(self, told: dict[str, Any]) -> None:
        """Let this engine's workers join the group that a trainer broadcasts weights over; see weight_receiver.JoinGroup.

        Raises WeightLoadError: one of them could not, in told["join_seconds"].
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=told))
        failures = [why for why in await self._llm.collective_rpc("weight_failure") if why]
        if failures:
            raise WeightLoadError(failures[0])

    async def load_weights(
        self, version: int, update: dict[str, Any], in_flight: InFlight = "recompute", to_score: Sequences = ()
    ) -> LoadReport:
        """Take a version that `WeightPublisher.publish` wrote, or that a trainer broadcasts now. No request begins meanwhile; each one waits.

        in_flight: what becomes of running requests, all of which go on under the new weights unless they are drained.
        "recompute": their cached keys and values are made anew. "keep_cache": they keep the old ones, which requests
        that begin later never meet. "drain": they end first. "abort": vLLM forgets them, and they go on as new requests.
        to_score: prompts and tokens after them whose log-probabilities under the new weights, at temperature 1, prove that the
        engine holds them; computed before any response begins. Not for a paused engine.

        Raises:
            WeightLoadError: it did not load whole; running requests raise it too, and so does `generate` from now on.
            ValueError: "drain" of a paused engine, whose requests cannot end.
        """
        assert update["version"] == version
        async with self._closed_door(in_flight) as drain_seconds:
            began = time.perf_counter()
            with self._pauses.timing():
                await self._llm.pause_generation(mode="keep", clear_cache=False)
                begun = [tokens for one in self._running.values() if (tokens := len(one.response) + one.tokens)]
                if in_flight in ("abort", "keep_cache"):
                    await self._cut(unbegun_only=in_flight == "keep_cache")
                await self._take(version, update, keep_cache=in_flight == "keep_cache")
                if not self._paused:
                    await self._llm.resume_generation()
            pause_seconds = time.perf_counter() - began
            scoring = [await self._begin_score(*sequence) for sequence in to_score]
        scored = list(await asyncio.gather(*scoring))
        return LoadReport(pause_seconds, drain_seconds, len(begun), sum(begun), scored)

    @asynccontextmanager
    async def _closed_door(self, in_flight: InFlight) -> AsyncIterator[float]:
        """No request begins inside. Gives the seconds in which running ones were drained before it."""
        if in_flight == "drain":
            await self.drain()
        if self._drained_seconds is None:
            await self._door.acquire()
        try:
            yield self._drained_seconds or 0.0
        finally:
            if self._drained_seconds is not None:
                self._drained_seconds = None
                self._pauses.end()
            self._door.release()

    async def drain(self) -> None:
        """Let running requests end, and have none begin until `load_weights` was called: for those who are to begin to send weights
        only when all engines can take them. Called again, it does nothing.

        Raises ValueError: the engine is paused, and its requests cannot end.
        """
        if self._drained_seconds is not None:
            return
        if self._paused:
            raise ValueError("a paused engine cannot drain: use schedule.in_flight recompute, keep_cache or abort")
        await self._door.acquire()
        try:
            started = time.perf_counter()
            await self._cut(unbegun_only=True)
            if self._running:
                await self._idle.wait()
            self._drained_seconds = time.perf_counter() - started
            self._pauses.begin()  # what waits at the door is not standing still
        except BaseException:
            self._door.release()
            raise

    async def _take(self, version: int, update: dict[str, Any], keep_cache: bool) -> None:
        """Load and check the weights of a paused engine, and see to it that no key or value of older ones is taken for
        one of theirs."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        try:
            await self._llm.start_weight_update()
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=update))
            failures = [why for why in await self._llm.collective_rpc("weight_failure") if why]
            await self._llm.finish_weight_update()
            if failures:
                raise WeightLoadError(failures[0])
            if self._lora_rank is not None:
                await self._llm.collective_rpc("activate_adapter")
            await self._llm.update_weight_version(str(version))
            if keep_cache:
                self._cache_epoch += 1
            elif not await self._llm.reset_prefix_cache(reset_running_requests=True):
                raise WeightLoadError("vLLM kept cached keys and values of the old weights")
        except Exception as error:
            self._unusable = f"weights of version {version} did not load over version {self._version}: {error}"
            await self.abort()
            await self._tell()
            raise WeightLoadError(self._unusable) from error
        self._version, self._unusable = version, None
        await self._tell()

    async def _tell(self) -> None:
        """Wake the requests that wait for a version."""
        async with self._came:
            self._came.notify_all()

    async def sleep(self) -> None:
        """Stop generating until `wake`, and give GPU memory back: weights move to host memory, the cache is dropped.

        Running requests stay, and go on after `wake` with their keys and values made anew. Only an engine with vLLM's
        enable_sleep_mode has memory to give back (a GPU's; not exercised yet); any other one just pauses.
        """
        await self.pause()
        if self.arguments.get("enable_sleep_mode"):
            await self._llm.sleep(level=1, mode="keep")

    async def wake(self) -> None:
        """Take the memory again after `sleep` and generate; before `load_weights`, which needs the memory.

        Raises WeightLoadError: as `resume`.
        """
        if self.arguments.get("enable_sleep_mode"):
            await self._llm.wake_up()
        await self.resume()

    def version(self) -> int:
        """The policy version that generates now."""
        return self._version

    def tokens_generated(self) -> int:
        """Since the start; the running responses' tokens so far among them."""
        return self._tokens_ended + sum(one.tokens for one in self._running.values())

    def paused_seconds(self) -> float:
        """Time since the start in which nothing could be generated: weights came, or `pause`, or `sleep`."""
        return self._pauses.seconds()

    async def shutdown(self) -> None:
        """End vLLM's processes."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()
