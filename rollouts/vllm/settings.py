"""Start vLLM: the arguments and the environment that suit an engine here, and the check of a user's own arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterator
from typing import Any

from plugins.nearest import nearest
from rollouts.vllm import internals

GIB = 1024**3


def start_vllm(arguments: dict[str, Any], environment: dict[str, str]) -> Any:
    """Start vLLM's asynchronous engine, whose processes see `environment`."""
    with changed_environment(environment):
        return internals.start_async_llm(arguments)


def engine_settings(
    device: str, tensor_parallel_size: int, threads: int, lora_rank: int | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return vLLM's engine arguments that do not depend on the model, and the environment for its processes.

    threads, lora_rank: see `VLLMEngine`.
    """
    arguments: dict[str, Any] = {
        # The log-probabilities of the distribution that was sampled from: after temperature, top-p and top-k.
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        # Of the requests that wait, those that may begin under the oldest version first: the trainer needs them first.
        "scheduling_policy": "priority",
        "worker_extension_cls": "rollouts.vllm.weight_receiver.ReceiverExtension",
        "weight_transfer_config": {"backend": "feynrl"},
        "disable_log_stats": True,
    }
    if lora_rank is not None:
        from rollouts.vllm.adapter_receiver import adapter_arguments

        arguments |= adapter_arguments(lora_rank)
    if device == "cpu":
        return arguments | cpu_arguments(tensor_parallel_size), cpu_environment(threads)
    return arguments, {}


def check_arguments(arguments: dict[str, Any]) -> None:
    """Raise ValueError, with the nearest name, when vLLM does not have one of these engine arguments."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name in arguments.keys() - known:
        guess = nearest(name, sorted(known))
        raise ValueError(
            f"rollout.engine.{name}: vLLM has no such engine argument{f'; did you mean {guess}?' if guess else ''}"
        )


def cpu_arguments(tensor_parallel_size: int) -> dict[str, Any]:
    """Return vLLM's arguments that suit a CPU engine; measured by benchmarks/rollout_throughput.py."""
    arguments: dict[str, Any] = {
        "enforce_eager": True,
        "kv_cache_memory_bytes": GIB,
        # The smallest the CPU kernels take. Only whole blocks of a prompt are shared by its responses, and vLLM's own
        # 128 leaves short prompts unshared: 1.8 times slower on prompts of 36 tokens.
        "block_size": 32,
        # More at once are not faster on a CPU (256 as fast as 128, 64 a tenth slower), and requests that were submitted
        # first would wait for later ones: in overlap the batch that the trainer waits for, for the batch after it.
        "max_num_seqs": 128,
    }
    if tensor_parallel_size == 1:
        # The model runs inside vLLM's core process. In a process of its own, the core spins on a second core meanwhile.
        arguments["distributed_executor_backend"] = "uni"
    return arguments


def cpu_environment(threads: int) -> dict[str, str]:
    """Return the environment of a CPU engine: its threads may move between cores, and sleep soon when they wait.

    A few microseconds of spinning bridge the gaps between one operation and the next: 1.23 times the tokens/s of none
    on two free cores, 0.77 times beside a busy process, where long spinning would cost most of the speed.
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
    """Set environment variables for processes that start in the block; vLLM reads its CPU settings only there."""
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
