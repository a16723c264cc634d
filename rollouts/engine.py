"""The rollout engine: vLLM's asynchronous engine behind the few calls a rollout needs. Token-in, token-out.

`VLLMEngine` is a plain class: use it in a process, or inside a Ray actor. vLLM is imported on construction.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import difflib
import itertools
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rollouts.records import FloatArray, IntArray
from rollouts.sampling import Sampling
from rollouts.stopwatch import Stopwatch

GIB = 1024**3


class WeightLoadError(RuntimeError):
    """An engine did not take a version whole. It refuses to generate until a later version loads."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """What the engine made after one prompt."""

    token_ids: IntArray  # [T], with the end-of-sequence token when the model ended by itself
    logprobs: FloatArray  # [T] of the distribution each token was sampled from
    versions: IntArray  # [T] policy version that made each token; several when weights changed in flight
    finish_reason: str  # "stop" ended by itself, "length" cut at the limit, "abort"
    seconds: float  # from request to last token, queueing included


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
        sync_method: str = "direct",
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
            "worker_extension_cls": "rollouts.weight_receiver.ReceiverExtension",
            "weight_transfer_config": {"backend": sync_method},
            "disable_log_stats": True,
        }
        self.environment: dict[str, str] = {}
        if device == "cpu":
            self.arguments |= cpu_arguments(tensor_parallel_size)
            self.environment = cpu_environment(threads)
        self._lora_rank = lora_rank
        if lora_rank is not None:
            from rollouts.adapter_receiver import adapter_arguments

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
        self._running: set[str] = set()
        self._tokens_returned = 0

    async def start(self) -> None:
        """Load the model, start vLLM's processes and make one token, which compiles what vLLM compiles (10 to 30 s)."""
        self._llm = await asyncio.to_thread(start_vllm, self.arguments, self.environment)
        if self._lora_rank is not None:
            from rollouts.adapter_receiver import adapter_request

            self._adapter = adapter_request()
            await self._llm.collective_rpc("begin_adapter", args=(self._lora_rank,))
        await self.generate([0], Sampling(max_new_tokens=1), 0, "warm-up", 0)

    async def generate(
        self, prompt_ids: Sequence[int] | IntArray, sampling: Sampling, step: int, prompt_id: str, sample: int
    ) -> Generation:
        """Sample one response to the prompt. step, prompt_id and sample only matter to a seeded sampling.

        Raises WeightLoadError: the last weight update failed (also for requests that were running then).
        """
        if self._unusable:
            raise WeightLoadError(self._unusable)
        started = time.perf_counter()
        request = f"{next(self._numbers)}"
        prompt = {"type": "token", "prompt_token_ids": np.asarray(prompt_ids).tolist()}
        self._running.add(request)
        try:
            asked = sampling.to_vllm(step, prompt_id, sample)
            outputs = self._llm.generate(prompt, asked, request, lora_request=self._adapter)
            async for output in outputs:
                final = output.outputs[0]
        finally:
            self._running.discard(request)
        if self._unusable:
            raise WeightLoadError(self._unusable)
        token_ids = np.asarray(final.token_ids, dtype=np.int32)
        self._tokens_returned += len(token_ids)
        logprobs = np.asarray(final.logprobs.logprobs, dtype=np.float32)
        # vLLM labels every token with the version active when it was sampled; "default" is before the first sync.
        spans = final.weight_versions or []
        labels = [0 if span.version == "default" else int(span.version) for span in spans]
        versions = np.repeat(np.asarray(labels, dtype=np.int32), [span.end - span.start for span in spans])
        assert final.finish_reason and len(token_ids) == len(logprobs) == len(versions)
        return Generation(token_ids, logprobs, versions, final.finish_reason, time.perf_counter() - started)

    async def abort(self) -> None:
        """End all running requests; each returns what it has, with finish reason "abort"."""
        await self._llm.abort(list(self._running))

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

    async def load_weights(self, version: int, update: dict[str, Any]) -> None:
        """Take a version that `WeightPublisher.publish` wrote; running requests go on under it.

        Nothing is generated meanwhile, and every cached key and value is recomputed under the new weights.

        Raises WeightLoadError: it did not load whole; running requests raise it too, and so does `generate` from now on.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        assert update["version"] == version
        self._pauses.begin()
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        try:
            await self._llm.start_weight_update()
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=update))
            failures = [why for why in await self._llm.collective_rpc("weight_update_failure") if why]
            await self._llm.finish_weight_update()
            if failures:
                raise WeightLoadError(failures[0])
            if self._lora_rank is not None:
                await self._llm.collective_rpc("activate_adapter")
            await self._llm.update_weight_version(str(version))
            if not await self._llm.reset_prefix_cache(reset_running_requests=True):
                raise WeightLoadError("vLLM kept cached keys and values of the old weights")
        except Exception as error:
            self._unusable = f"weights of version {version} did not load over version {self._version}: {error}"
            await self.abort()
            raise WeightLoadError(self._unusable) from error
        finally:
            self._pauses.end()
        self._version, self._unusable = version, None
        if not self._paused:
            await self._llm.resume_generation()

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
        running = self._llm.output_processor.request_states.values()
        return self._tokens_returned + sum(state.detokenizer.num_output_tokens() for state in running)

    def paused_seconds(self) -> float:
        """Time since the start in which nothing could be generated: weights came, or `pause`, or `sleep`."""
        return self._pauses.seconds()

    async def shutdown(self) -> None:
        """End vLLM's processes."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()


def start_vllm(arguments: dict[str, Any], environment: dict[str, str]) -> Any:
    """An AsyncLLM whose processes see `environment`."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    with changed_environment(environment):
        # The context picks vLLM's batch-size defaults: those of offline throughput.
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)


def check_arguments(arguments: dict[str, Any]) -> None:
    """Raise ValueError, with the nearest name, when vLLM has no such engine argument."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name in arguments.keys() - known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"rollout.engine.{name}: vLLM has no such engine argument{hint}")


def cpu_arguments(tensor_parallel_size: int) -> dict[str, Any]:
    """vLLM arguments that suit a CPU engine; measured in benchmarks/rollout_throughput.py."""
    arguments: dict[str, Any] = {
        "enforce_eager": True,
        "kv_cache_memory_bytes": GIB,
        # The smallest the CPU kernels take. Only whole blocks of a prompt are shared by its responses, and vLLM's own
        # 128 leaves short prompts unshared: 1.8 times slower on prompts of 36 tokens.
        "block_size": 32,
    }
    if tensor_parallel_size == 1:
        # The model runs inside vLLM's core process. In a process of its own, the core spins on a second core meanwhile.
        arguments["distributed_executor_backend"] = "uni"
    return arguments


def cpu_environment(threads: int) -> dict[str, str]:
    """Environment of a CPU engine: threads that may move between cores, and sleep soon when they wait.

    A few microseconds of spinning bridge the gaps between one operation and the next: 1.23 times the tokens/s of none
    on two free cores, 0.77 times beside a busy process. Long spinning beside one would cost most of the speed.
    """
    environment = {
        "OMP_NUM_THREADS": str(threads or len(os.sched_getaffinity(0))),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "3000"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # without it vLLM overrules the executor chosen in cpu_arguments
    }
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        # vLLM compiles one function of its sampler with the C++ compiler. Without one it runs as it is written, slower.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    return environment


@contextlib.contextmanager
def changed_environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for the processes started inside; vLLM takes its CPU settings in no other way."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
