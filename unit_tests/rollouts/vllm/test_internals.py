"""What `rollouts/vllm/internals.py` assumes of vLLM, held against the installed one. Behaviour that takes a running
engine is tested in unit_tests/e2e/test_engine_sync.py, test_lora_sync.py and test_in_flight.py.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm

from rollouts.vllm import internals
from rollouts.vllm.weight_broadcast import listening_socket

PATH = Path(internals.__file__)


def test_the_version_is_the_one_that_the_assumptions_were_read_in() -> None:
    """After an upgrade: read internals.py beside the new vLLM, then change both numbers."""
    assert vllm.__version__.startswith("0.32.")
    assert "Written for vLLM 0.32." in (internals.__doc__ or "")


def imported() -> list[tuple[str, str]]:
    nodes = [node for node in ast.walk(ast.parse(PATH.read_text())) if isinstance(node, ast.ImportFrom)]
    return [(str(node.module), alias.name) for node in nodes for alias in node.names if str(node.module)[:4] == "vllm"]


@pytest.mark.parametrize(("module", "name"), imported())
def test_everything_that_is_imported_is_there(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


PARAMETERS = [
    ("vllm.v1.engine.async_llm", "AsyncLLM.from_engine_args", ["engine_args", "usage_context"]),
    (
        "vllm.v1.engine.async_llm",
        "AsyncLLM.add_request",
        ["request_id", "prompt", "params", "lora_request", "priority"],
    ),
    ("vllm.v1.engine.utils", "CoreEngineProcManager.finished_procs", ["self"]),
    (
        "vllm.distributed.utils",
        "stateless_init_torch_distributed_process_group",
        ["host", "port", "rank", "world_size", "backend", "listen_socket", "timeout"],
    ),
    (
        "vllm.distributed.utils",
        "StatelessProcessGroup.create",
        ["host", "port", "rank", "world_size", "store_timeout", "listen_socket"],
    ),
    ("vllm.distributed.device_communicators.pynccl", "PyNcclCommunicator", ["group", "device"]),
    ("vllm.distributed.device_communicators.pynccl", "PyNcclCommunicator.broadcast", ["self", "tensor", "src"]),
    ("vllm.distributed.device_communicators.pynccl", "PyNcclCommunicator.destroy", ["self"]),
    (
        "vllm.lora.lora_model",
        "LoRAModel.from_lora_tensors",
        ["lora_model_id", "tensors", "peft_helper", "device", "dtype", "weights_mapper"],
    ),
    ("vllm.lora.peft_helper", "PEFTHelper.from_dict", ["config_dict"]),
    ("vllm.lora.model_manager", "LoRAModelManager.remove_adapter", ["self", "adapter_id"]),
    ("vllm.lora.model_manager", "LoRAModelManager.add_adapter", ["self", "adapter"]),
    ("vllm.lora.model_manager", "LoRAModelManager.activate_adapter", ["self"]),
    ("vllm.lora.worker_manager", "WorkerLoRAManager.add_dummy_lora", ["self", "lora_request", "rank"]),
]


@pytest.mark.parametrize(("module", "path", "expected"), PARAMETERS)
def test_parameters_are_there(module: str, path: str, expected: list[str]) -> None:
    called: Any = importlib.import_module(module)
    for name in path.split("."):
        called = getattr(called, name)
    assert set(expected) - {"self"} <= inspect.signature(called).parameters.keys()


ATTRIBUTES = [  # where an instance gets the attributes that are read
    ("vllm.v1.engine.output_processor", "OutputProcessor.__init__", ["self.request_states"]),
    ("vllm.v1.engine.output_processor", "RequestOutputCollector.__init__", ["self.request_id"]),
    ("vllm.v1.engine.output_processor", "RequestState.__init__", ["self.detokenizer"]),
    ("vllm.v1.engine.async_llm", "AsyncLLM.__init__", ["self.output_processor", "self.engine_core"]),
    ("vllm.v1.engine.core_client", "MPClient.__init__", ["self.resources"]),
    ("vllm.distributed.device_communicators.pynccl", "PyNcclCommunicator.destroy", ["ncclCommAbort", "self.disabled"]),
    ("vllm.v1.worker.gpu_worker", "Worker.__init__", ["self.weight_transfer_engine"]),
    ("vllm.v1.worker.lora_model_runner_mixin", "LoRAModelRunnerMixin.load_lora_model", ["self.lora_manager"]),
    (
        "vllm.lora.model_manager",
        "LoRAModelManager.__init__",
        ["self.modules", "self.packed_modules", "self.lora_config"],
    ),
    ("vllm.lora.model_manager", "LoRAModelManager.__init__", [".lora_manager = self"]),
    ("vllm.lora.lora_model", "LoRAModel.__init__", ["self.id", "self.loras"]),
    (
        "vllm.model_executor.layers.vocab_parallel_embedding",
        "VocabParallelEmbedding.__init__",
        ["self.num_embeddings_per_partition", "self.shard_indices", "self.embedding_dim"],
    ),
    ("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", ["layer.cpu_linear"]),
    (
        "vllm.model_executor.model_loader.reload.layerwise",
        "make_online_process_loader",
        ["info.load_numel += ", "_layerwise_process(layer, info)"],
    ),
]


@pytest.mark.parametrize(("module", "path", "expected"), ATTRIBUTES)
def test_attributes_are_set_where_they_are_expected(module: str, path: str, expected: list[str]) -> None:
    where: Any = importlib.import_module(module)
    for name in path.split("."):
        where = getattr(where, name)
    source = inspect.getsource(where)
    assert [one for one in expected if one not in source] == []


def test_a_prompt_may_be_token_ids_with_a_salt() -> None:
    from vllm.inputs.engine import TokensInput, tokens_input

    assert {"type", "prompt_token_ids", "cache_salt"} <= TokensInput.__annotations__.keys()
    assert tokens_input([1, 2])["type"] == "token"


def test_tokens_are_counted_without_making_text() -> None:
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    state = SimpleNamespace(detokenizer=IncrementalDetokenizer())
    state.detokenizer.update([5, 6, 7], False)
    assert internals.tokens_made(state) == 3


def test_a_reload_record_counts_elements() -> None:
    from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

    record = LayerReloadingInfo(restore_metadata=({}, {}), restore_device=torch.device("cpu"))
    assert not record.can_load()
    assert "load_numel" in {field.name for field in dataclasses.fields(record)}
    record.load_numel_total = 5
    assert record.can_load() and record.load_numel == 0


def test_vllm_has_buffers_for_adapters_of_certain_ranks() -> None:
    assert internals.adapter_ranks()[:2] == [1, 8]


def test_a_communicator_without_nccl_is_refused() -> None:
    """vLLM makes it all the same, and its broadcasts do nothing. (A group of one has none either.)"""
    listening = listening_socket("127.0.0.1")
    assert listening.getsockname()[0] == "127.0.0.1", "the group of one machine is not offered to its network"
    port = listening.getsockname()[1]
    with pytest.raises(RuntimeError, match="vLLM found no NCCL library"):
        internals.join_nccl_group("127.0.0.1", port, 0, 1, torch.device("cpu"), 5.0, listening)


class Embedding(torch.nn.Module):
    """As vLLM's, on a CPU after loading."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.cpu_linear = torch.nn.Parameter(torch.zeros(2)), object()


def test_a_tied_head_gets_weight_and_packed_product_of_the_embedding() -> None:
    head, embedding = Embedding(), Embedding()
    internals.repack_tied_heads([(head, embedding)], torch.device("cpu"))
    assert head.weight is embedding.weight and head.cpu_linear is embedding.cpu_linear


def test_longrope_in_vllm_takes_its_factors_from_max_model_len() -> None:
    """The trainer takes them by the same rule from the job's longest sequence (orchestration/model/rotary.py)."""
    from vllm.model_executor.layers.rotary_embedding import Phi3LongRoPEScaledRotaryEmbedding

    text = inspect.getsource(Phi3LongRoPEScaledRotaryEmbedding)
    assert "max_model_len = get_current_vllm_config().model_config.max_model_len" in text
    assert "self.use_long_rope = max_model_len > original_max_position_embeddings" in text
