"""What vLLM is started with, and what it is told when that makes no sense."""

from __future__ import annotations

import os
import sys

import pytest

from rollouts.vllm.engine import VLLMEngine
from rollouts.vllm.settings import changed_environment


def test_users_arguments_win() -> None:
    engine = VLLMEngine("some/model", dtype="float32", max_model_len=64, engine={"block_size": 64, "max_model_len": 32})
    assert engine.arguments["block_size"] == 64
    assert engine.arguments["max_model_len"] == 32
    assert engine.arguments["dtype"] == "float32"


def test_logprobs_are_those_of_the_sampled_distribution_and_weights_can_be_sent() -> None:
    arguments = VLLMEngine("some/model", device="cuda").arguments
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["weight_transfer_config"] == {"backend": "feynrl"}
    assert arguments["worker_extension_cls"] == "rollouts.vllm.weight_receiver.ReceiverExtension"


def test_a_cpu_engine_is_told_its_threads_and_a_gpu_engine_is_left_alone() -> None:
    engine = VLLMEngine("some/model", device="cpu", threads=3)
    assert engine.environment["OMP_NUM_THREADS"] == "3"
    assert engine.arguments["enforce_eager"] is True
    engine = VLLMEngine("some/model", device="cuda", threads=3)
    assert engine.environment == {}
    assert not {"enforce_eager", "kv_cache_memory_bytes", "block_size"} & engine.arguments.keys()


def test_one_process_unless_the_model_is_split() -> None:
    assert VLLMEngine("some/model", device="cpu").arguments["distributed_executor_backend"] == "uni"
    assert (
        "distributed_executor_backend" not in VLLMEngine("some/model", device="cpu", tensor_parallel_size=2).arguments
    )


def test_without_a_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", sys.executable)
    assert "TORCHDYNAMO_DISABLE" not in VLLMEngine("some/model", device="cpu").environment
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert VLLMEngine("some/model", device="cpu").environment["TORCHDYNAMO_DISABLE"] == "1"


def test_an_argument_vllm_does_not_know_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"rollout\.engine\.max_num_sequences: .* did you mean max_num_seqs\?"):
        VLLMEngine("some/model", engine={"max_num_sequences": 8})


def test_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    with changed_environment({"OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}):
        assert os.environ["OMP_NUM_THREADS"] == "2"
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in os.environ
