"""The rollout engine: vLLM's asynchronous engine behind the few calls a rollout needs. Token-in, token-out.

`VLLMEngine` is a plain class: use it in a process, or inside a Ray actor. vLLM is imported on construction.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import time
from collections.abc import Sequence
from typing import Any, Literal

from records.rollout import FloatArray, IntArray
from rollouts.vllm import internals
from rollouts.vllm.busy_timer import BusyTimer
from rollouts.vllm.requests import Requests
from rollouts.vllm.response import Generation, Response
from rollouts.vllm.sampling import Sampling
from rollouts.vllm.settings import check_arguments, engine_settings, start_vllm

InFlight = Literal["recompute", "keep_cache", "drain", "abort"]
Sequences = Sequence[tuple[IntArray, IntArray]]  # prompts, and tokens after them


class WeightLoadError(RuntimeError):
    """The error of an engine that did not load a version whole. It refuses to generate until a later version loads."""


@dataclasses.dataclass(frozen=True)
class ReadBack:
    """How the weights that an engine holds were compared with those it was sent; they were the same."""

    seconds: float = 0.0
    unread_share: float = 0.0  # of the weights, in a layout that cannot be compared


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What loading weights did to the running responses."""

    pause_seconds: float  # how long nothing could be generated
    drain_seconds: float  # how long, before that, running responses were finished and none begun
    requests_in_flight: int  # running responses that had tokens when generation paused; all of them go on
    tokens_kept: int  # how many tokens those had
    scored: list[FloatArray] = dataclasses.field(default_factory=list)  # [T] for every sequence that was to be scored
    read_back: ReadBack = dataclasses.field(default_factory=ReadBack)


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

        max_model_len: prompt and response tokens together; None: the model's own limit.
        seed: for the noise of unseeded requests; give every engine of a run its own, or they all draw the same.
        threads: how many a CPU engine uses; 0: one for each core that this process may use.
        lora_rank: the engine takes adapters of this rank instead of whole models; it starts with one of zeros.
        engine: any arguments of vLLM's AsyncEngineArgs; they win over everything chosen here.

        Raises ValueError when vLLM does not know an argument.
        """
        internals.import_vllm()
        given = {
            "model": model_path,
            "dtype": dtype,
            "tensor_parallel_size": tensor_parallel_size,
            "max_model_len": max_model_len,
            "seed": seed,
            "trust_remote_code": trust_remote_code,
        }
        chosen, self.environment = engine_settings(device, tensor_parallel_size, threads, lora_rank)
        self.arguments: dict[str, Any] = given | chosen | (engine or {})
        check_arguments(self.arguments)
        self._lora_rank = lora_rank
        self._llm: Any = None
        self.requests: Requests  # from `start` on
        self._version = 0
        self._unusable: str | None = None  # why the last weights did not load
        self._weights_came = asyncio.Condition()  # also notified when they did not load
        self._paused = False
        self._pauses = BusyTimer()
        self._aborts = 0  # how often `abort` was called

    async def start(self) -> None:
        """Load the model, start vLLM's processes and make one token, which compiles what vLLM compiles (10 to 30 s)."""
        self._llm = await asyncio.to_thread(start_vllm, self.arguments, self.environment)
        adapter = None
        if self._lora_rank is not None:
            from rollouts.vllm.adapter_receiver import adapter_request

            adapter = adapter_request()
            await self._llm.collective_rpc("begin_adapter", args=(self._lora_rank,))
        self.requests = Requests(self._llm, adapter, self._pauses)
        await self.generate([0], Sampling(max_new_tokens=1), 0, "warm-up", 0)
        self.requests.count_from_now()

    async def shutdown(self) -> None:
        """End vLLM's processes."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()

    def death(self) -> str | None:
        """Return how vLLM's process ended, in words; None while it lives."""
        if self._llm is None or not self._llm.errored:
            return None
        words = [
            f"{name}: {f'signal {signal.Signals(-code).name}' if code < 0 else f'exit code {code}'}"
            for name, code in internals.ended_processes(self._llm).items()
        ]
        return "vLLM's process died, " + (", ".join(words) or "its exit code is not known yet")

    async def generate(
        self,
        prompt_ids: Sequence[int] | IntArray,
        sampling: Sampling,
        step: int,
        prompt_id: str,
        sample: int,
        oldest_version: int = 0,
    ) -> Generation:
        """Sample one response to the prompt. step, prompt_id and sample only matter when the sampling is seeded.

        oldest_version: wait until this version or a later one is loaded, and begin under it.

        Raise WeightLoadError when the last weight update failed, or one fails while this response is running.
        """
        async with self._weights_came:
            await self._weights_came.wait_for(lambda: self._version >= oldest_version or self._unusable)
        started = time.perf_counter()
        response, aborts = Response(prompt_ids, sampling), self._aborts
        while response.finish_reason == "abort":
            async with self.requests.door:
                if self._unusable:
                    raise WeightLoadError(self._unusable)
                if self._aborts > aborts:
                    break
                parameters = response.parameters(step, prompt_id, sample)
                request = await self.requests.submit(response, parameters, priority=oldest_version)
            response.add(await self.requests.outcome(request), self._decode)
        if self._unusable:
            raise WeightLoadError(self._unusable)
        return response.generation(time.perf_counter() - started)

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._llm.get_tokenizer().decode(token_ids, skip_special_tokens=True)
        return text

    async def abort(self) -> None:
        """End all running responses; each is returned as it is, with finish reason "abort"."""
        self._aborts += 1
        await self.requests.cancel()

    async def pause(self) -> None:
        """Stop generating; running requests stay and new ones queue until `resume`."""
        if not self._paused:
            self._paused = True
            self._pauses.begin()
            await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """Generate again after `pause`. Raise WeightLoadError when the last weight update failed."""
        if self._unusable:
            raise WeightLoadError(self._unusable)
        if self._paused:
            self._paused = False
            await self._llm.resume_generation()
            self._pauses.end()

    async def sleep(self) -> None:
        """Stop generating until `wake`, and give GPU memory back: weights move to host memory, the cache is dropped.

        Running requests stay, and continue after `wake` with their keys and values computed anew. Only an engine with
        vLLM's enable_sleep_mode has memory to give back (a GPU's; not yet run); any other one just pauses.
        """
        await self.pause()
        if self.arguments.get("enable_sleep_mode"):
            await self._llm.sleep(level=1, mode="keep")

    async def wake(self) -> None:
        """Take the memory again after `sleep` and generate; call it before `load_weights`, which needs the memory.

        Raises WeightLoadError when the last weight update failed.
        """
        if self.arguments.get("enable_sleep_mode"):
            await self._llm.wake_up()
        await self.resume()

    async def drain(self) -> None:
        """Let running requests end, and let none begin until `load_weights` was called. A second call does nothing.

        A broadcast begins only after all engines were drained, because then all of them can receive it.
        Raise ValueError when the engine is paused, because its requests cannot end.
        """
        if self._paused and not self.requests.are_drained:
            raise ValueError("a paused engine cannot drain: use schedule.in_flight recompute, keep_cache or abort")
        await self.requests.drain()

    async def join_transfer(self, group: dict[str, Any]) -> None:
        """Let this engine's workers join the group over which a trainer broadcasts weights.

        group: the fields of `weight_receiver.JoinGroup`.

        Raise WeightLoadError when one of them could not join within `join_seconds` of the group.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=group))
        await self._raise_weight_failure()

    async def load_weights(
        self, version: int, update: dict[str, Any], in_flight: InFlight = "recompute", to_score: Sequences = ()
    ) -> LoadReport:
        """Load a version that a trainer has published, or that it broadcasts now. New requests wait until it is loaded.

        in_flight: what becomes of running requests; all but the drained ones continue under the new weights.
        "recompute": their cached keys and values are computed anew. "keep_cache": they keep the old ones, which are not
        shared with requests that begin later. "drain": they end first. "abort": vLLM forgets them, and they continue as
        new requests.
        to_score: prompts and tokens after them. Their log-probabilities under the new weights, at temperature 1, show
        that the engine holds these weights; they are computed before any response begins. Not for a paused engine.

        Raises:
            WeightLoadError: the version did not load whole; running requests raise it too, and so does `generate` from
            now on.
            ValueError: in_flight is "drain" and the engine is paused, so its requests cannot end.
        """
        assert update["version"] == version
        if in_flight == "drain":
            await self.drain()
        async with self.requests.held_back() as drain_seconds:
            began = time.perf_counter()
            with self._pauses.timing():
                await self._llm.pause_generation(mode="keep", clear_cache=False)
                kept = self.requests.response_tokens()
                if in_flight in ("abort", "keep_cache"):  # `generate` submits them again when the door opens
                    await self.requests.cancel(unbegun_only=in_flight == "keep_cache")
                read_back = await self._take(version, update, keep_cache=in_flight == "keep_cache")
                if not self._paused:
                    await self._llm.resume_generation()
            pause_seconds = time.perf_counter() - began
            scoring = [await self.requests.submit_scoring(*sequence) for sequence in to_score]
        scored = list(await asyncio.gather(*scoring))
        return LoadReport(pause_seconds, drain_seconds, len(kept), sum(kept), scored, read_back)

    async def _take(self, version: int, update: dict[str, Any], keep_cache: bool) -> ReadBack:
        """Load and check the weights of a paused engine, and make sure that keys and values of older weights are not
        used for new requests."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        try:
            await self._llm.start_weight_update()
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=update))
            await self._llm.finish_weight_update()
            await self._raise_weight_failure()
            if self._lora_rank is not None:
                await self._llm.collective_rpc("activate_adapter")
            read_back = await self._read_back(version)
            await self._llm.update_weight_version(str(version))
            if keep_cache:
                self.requests.cache_epoch += 1
            elif not await self._llm.reset_prefix_cache(reset_running_requests=True):
                raise WeightLoadError("vLLM kept cached keys and values of the old weights")
        except Exception as error:
            self._unusable = f"weights of version {version} did not load over version {self._version}: {error}"
            await self.abort()
            raise WeightLoadError(self._unusable) from error
        else:
            self._version, self._unusable = version, None
            return read_back
        finally:
            async with self._weights_came:
                self._weights_came.notify_all()

    async def _raise_weight_failure(self) -> None:
        """Raise WeightLoadError when a worker could not do the last update, or join the last group."""
        failures = [why for why in await self._llm.collective_rpc("weight_failure") if why]
        if failures:
            raise WeightLoadError(failures[0])

    async def _read_back(self, version: int) -> ReadBack:
        """Let workers compare what they compute with to what they were sent. Raise WeightLoadError when one differs."""
        began = time.perf_counter()
        shares, others = zip(*await self._llm.collective_rpc("read_back", args=(version,)), strict=True)
        if any(others):
            worker, found = next((i, names) for i, names in enumerate(others) if names)
            raise WeightLoadError(
                f"worker {worker} does not hold what it was sent in {len(found)} parameters: {', '.join(found[:4])}"
            )
        return ReadBack(time.perf_counter() - began, 1 - min(shares))

    def version(self) -> int:
        """Return the version of the policy that generates now."""
        return self._version

    def tokens_generated(self) -> int:
        """Return how many tokens were generated since the start, with those of running responses so far."""
        return self.requests.tokens_generated()

    def paused_seconds(self) -> float:
        """Return how long nothing could be generated since the start: loading weights, `pause` and `sleep`."""
        return self._pauses.seconds()
