"""All that we use of vLLM although vLLM does not document it. No other file imports vLLM's private modules.

Written for vLLM 0.32. Each function says what it assumes and what breaks when the assumption no longer holds;
`unit_tests/rollouts/vllm/test_internals.py` checks each assumption on the vLLM that is installed. vLLM is imported
inside the functions, because that takes seconds and the driver never needs it.
"""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, get_args

import torch
from torch import Tensor, nn

Named = tuple[str, Tensor]
Described = tuple[str, tuple[list[int], torch.dtype]]  # a tensor's name, shape and dtype, as vLLM's receivers want them

# ---- the engine, seen from the process that drives it ----


def import_vllm() -> None:
    """Import vLLM's engine, 9 s of processor time, without garbage collections, which would take a quarter more.

    Later collections leave alone what is there by then. Assumed: the module's path. Otherwise nothing is imported.
    """
    gc.disable()
    try:
        import vllm.v1.engine.async_llm  # noqa: F401
    finally:
        gc.enable()
    gc.freeze()


def start_async_llm(arguments: dict[str, Any]) -> Any:
    """Start vLLM's asynchronous engine.

    Assumed: the class and its module path, and that the usage context picks the batch-size defaults (here those of
    offline throughput). Otherwise no engine starts, or it uses smaller batches.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)


async def submit_request(
    llm: Any,
    name: str,
    token_ids: list[int],
    parameters: Any,
    adapter: Any,
    priority: int,
    cache_salt: str | None = None,
) -> Any:
    """Submit a request to vLLM; return its answer, of which `await answer.get()` is vLLM's output.

    cache_salt: only requests with the same salt share cached keys and values.
    Assumed: `add_request` returns before the response is made (vLLM documents only `generate`, which does not), and
    takes a prompt of type "token" as one that was tokenised before. Otherwise requests could not be counted when they
    begin.
    """
    prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": token_ids}
    if cache_salt is not None:
        prompt["cache_salt"] = cache_salt
    return await llm.add_request(name, prompt, parameters, lora_request=adapter, priority=priority)


def request_state(llm: Any, answer: Any) -> Any:
    """Return vLLM's own record of a request that was just submitted; vLLM updates it from then on.

    Assumed: the output processor keeps such a record by the answer's `request_id`. Otherwise every request fails.
    """
    return llm.output_processor.request_states[answer.request_id]


def tokens_made(state: Any) -> int:
    """Return how many tokens a request has made so far, also after it ended.

    Assumed: the record's detokenizer counts them, whether or not it makes text of them. Otherwise heartbeats fail.
    """
    made: int = state.detokenizer.num_output_tokens()
    return made


def ended_processes(llm: Any) -> dict[str, int]:
    """Return the exit codes of vLLM's processes that have ended, by name.

    Assumed: the client of an engine in processes of its own keeps their manager. Otherwise a death is noticed, but its
    report fails.
    """
    codes: dict[str, int] = llm.engine_core.resources.engine_manager.finished_procs()
    return codes


# ---- weights on their way to a worker ----


def join_gloo_group(
    host: str, port: int, rank: int, size: int, timeout_seconds: float, listening: socket.socket | None
) -> Any:
    """Return a process group of torch's that is independent of the default one.

    Assumed: vLLM's function for it, which takes the socket on which rank 0 listens. Otherwise `sync.method: nccl` fails
    on CPUs.
    """
    from vllm.distributed.utils import stateless_init_torch_distributed_process_group

    return stateless_init_torch_distributed_process_group(
        host, port, rank, size, "gloo", listen_socket=listening, timeout=timedelta(seconds=timeout_seconds)
    )


def join_nccl_group(
    host: str, port: int, rank: int, size: int, device: torch.device, timeout_seconds: float,
    listening: socket.socket | None,
) -> Any:  # fmt: skip
    """Return vLLM's NCCL communicator of a group. Not yet run on a GPU.

    Assumed: what vLLM's `nccl_common.stateless_init_process_group` does, which takes neither a time-out nor a socket. A
    communicator that finds no NCCL library is made all the same, and its broadcasts do nothing; that is refused here.
    """
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.utils.nccl import unpinned_nccl_env

    store_timeout = max(1, round(timeout_seconds))
    group = StatelessProcessGroup.create(host, port, rank, size, store_timeout=store_timeout, listen_socket=listening)
    with unpinned_nccl_env():
        communicator = PyNcclCommunicator(group, device=device)
    if communicator.disabled:
        raise RuntimeError("vLLM found no NCCL library")
    return communicator


def send_over_nccl(group: Any, tensors: Iterator[Named], bucket_bytes: int) -> None:
    """Broadcast tensors through `group.broadcast(tensor, src)`, two buckets in turn. Not yet run on a GPU.

    Assumed: vLLM's packed broadcast needs only the method `broadcast` of a group.
    """
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

    packed_nccl_broadcast_producer(tensors, group, 0, lambda pair: pair[1], bucket_bytes)


def receive_over_nccl(
    group: Any, described: Iterator[Described], load: Callable[[list[Named]], None], bucket_bytes: int
) -> None:
    """Receive what `send_over_nccl` sends, and load it bucket by bucket. Not yet run on a GPU."""
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

    packed_nccl_broadcast_consumer(described, group, 0, load, bucket_bytes, device=group.device)


def ipc_handle(tensor: Tensor) -> tuple[Any, ...]:
    """Return the handle by which vLLM's IPC receiver opens a tensor on a GPU. Make one per version: torch counts them.

    Assumed: the receiver takes the arguments of torch's own `reduce_tensor`. Not yet run on a GPU.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    arguments: tuple[Any, ...] = reduce_tensor(tensor)[1]
    return arguments


def open_over_ipc(receiver: Any, described: list[Described], handles: list[tuple[Any, ...]], gpu: str) -> list[Named]:
    """Return tensors in another process's GPU memory, opened by vLLM's IPC receiver. Not yet run on a GPU.

    receiver: any weight-transfer engine of this worker. gpu: the UUID of the GPU that holds them.
    Assumed: `receive_weights` hands all tensors to its model's `load_weights` at once, and needs nothing else of the
    model.
    Raise ValueError when the tensors are on another GPU than this worker.
    """
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo

    opened: list[Named] = []
    engine = IPCWeightTransferEngine(
        receiver.config, receiver.vllm_config, receiver.device, SimpleNamespace(load_weights=opened.extend)
    )
    engine.receive_weights(
        IPCWeightTransferUpdateInfo(
            names=[name for name, _ in described],
            dtype_names=[str(dtype).removeprefix("torch.") for _, (_, dtype) in described],
            shapes=[shape for _, (shape, _) in described],
            ipc_handles=[{gpu: handle} for handle in handles],
        )
    )
    return opened


# ---- loading a whole model in a worker ----


def begin_reload(model: nn.Module) -> None:
    """Make the layers of a loaded model ready for new weights, which are processed layer by layer as they come.

    Assumed: vLLM's layerwise reload; `model.load_weights` alone fails on a CPU, where packed weights replaced the
    originals. Experts are packed there, and padded, only while their layer's method has no `moe_kernel`; otherwise the
    reload would copy raw weights into packed storage without any error.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload

    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and layer.w13_weight.device.type == "cpu":
            method.moe_kernel = None
    initialize_layerwise_reload(model)


def finish_reload(model: nn.Module, model_config: Any) -> None:
    """Process the layers that `begin_reload` left for the end: attention layers, and layers that lack elements."""
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

    finalize_layerwise_reload(model, model_config)


def incomplete_layers(model: nn.Module, tied: list[tuple[nn.Module, nn.Module]]) -> list[str]:
    """Return the names of layers that received fewer elements than they hold, between `begin_reload` and
    `finish_reload`.

    tied: see `tied_heads`; heads get no elements of their own, and rows that pad the vocabulary get none either.
    Assumed: vLLM counts loaded elements by layer in its reload records, and forgets the count of a complete layer. vLLM
    itself would fill the rest with whatever is in memory.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    heads = {id(head) for head, _ in tied}
    incomplete = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or id(layer) in heads or is_deferred_attention_layer(layer):
            continue  # complete layers are processed at once and no longer loading
        expected = sum(p.numel() for p in layer.parameters(recurse=False))
        if isinstance(layer, VocabParallelEmbedding):
            padding = layer.num_embeddings_per_partition - layer.shard_indices.num_org_elements
            expected -= padding * layer.embedding_dim
        if info.load_numel < expected:
            incomplete.append(f"{name} ({info.load_numel} of {expected})")
    return incomplete


def tied_heads(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Return the (head, embedding) pairs of a loaded model that share one weight.

    Assumed: vLLM's two classes for them, and that tying makes their `weight` one object.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    embeddings = [m for m in model.modules() if type(m) is VocabParallelEmbedding]
    heads = [m for m in model.modules() if isinstance(m, ParallelLMHead)]
    return [(head, embedding) for head in heads for embedding in embeddings if head.weight is embedding.weight]


def repack_tied_heads(tied: list[tuple[nn.Module, nn.Module]], device: torch.device) -> None:
    """Give heads that share their weight with the embedding the new weight.

    Assumed: on a CPU vLLM packs linear weights after loading and computes with `cpu_linear`; its reload repacks every
    layer except a tied head, which would continue to compute with the old weights without any error. The embedding is
    packed as a head would be.
    """
    for head, embedding in tied:
        head.weight = embedding.weight
        if device.type == "cpu":
            head.cpu_linear = embedding.cpu_linear


@contextmanager
def processing_seen(
    model: nn.Module, before: Callable[[nn.Module], None], after: Callable[[nn.Module], None]
) -> Iterator[None]:
    """In the block, call functions before and after a layer's loaded weights are brought into its kernel's order.

    Assumed: vLLM does that by `process_weights_after_loading` of the layer's `quant_method`, during the load of its
    last tensor. Otherwise weights in an order of their own are taken for other ones, and refused.
    """
    methods = {id(one): one for layer in model.modules() if (one := getattr(layer, "quant_method", None)) is not None}

    def seen(process: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        def processed(layer: nn.Module) -> None:
            before(layer)
            process(layer)
            after(layer)

        return processed

    for method in methods.values():
        method.process_weights_after_loading = seen(method.process_weights_after_loading)
    try:
        yield
    finally:
        for method in methods.values():
            del method.process_weights_after_loading


def packed_product(layer: nn.Module | None) -> Any:
    """Return the function (x, weight, bias) by which a layer on a CPU multiplies with its packed weight; None for a
    layer that has none.

    Assumed: vLLM keeps it in `cpu_linear`, and it ignores the weight given. Otherwise packed weights are not read back.
    """
    return getattr(layer, "cpu_linear", None)


# ---- adapters in a worker ----


def adapter_ranks() -> list[int]:
    """Return the adapter ranks that vLLM has buffers for. Assumed: they are a `Literal` type of its configuration."""
    from vllm.config.lora import MaxLoRARanks

    return sorted(get_args(MaxLoRARanks))


def takes_adapters(model: nn.Module) -> bool:
    """Return whether the engine was started with room for adapters. Assumed: the model then has vLLM's manager."""
    return hasattr(model, "lora_manager")


def made_adapter(model: nn.Module, adapter_id: int, tensors: dict[str, Tensor], config: dict[str, Any]) -> Any:
    """Return an adapter as vLLM holds one, made of tensors with PEFT's names.

    config: as PEFT's adapter_config.json.
    Assumed: `from_lora_tensors` and its arguments. vLLM leaves out those parts of an adapter that it does not know; see
    `unknown_parts`.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager: Any = model.lora_manager
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return LoRAModel.from_lora_tensors(
        lora_model_id=adapter_id,
        tensors=tensors,
        peft_helper=PEFTHelper.from_dict(config),
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )


def unknown_parts(model: nn.Module, adapter: Any) -> list[str]:
    """Return the parts of an adapter that the model has no layer for.

    Assumed: vLLM's manager knows its layers by `modules`, and the parts of fused ones by `packed_modules`.
    """
    manager: Any = model.lora_manager
    known = {part for name in manager.modules for part in manager.packed_modules.get(name, [name])}
    return sorted(adapter.loras.keys() - known)


def replace_adapter(model: nn.Module, adapter: Any) -> None:
    """Replace the adapter that has the same id. Assumed: three methods of vLLM's manager."""
    manager: Any = model.lora_manager
    manager.remove_adapter(adapter.id)
    manager.add_adapter(adapter)
    manager.activate_adapter(adapter.id)


def hold_empty_adapter(model_runner: Any, request: Any, rank: int) -> None:
    """Give a worker an adapter of zeros. Assumed: the function that vLLM itself uses to warm up."""
    model_runner.lora_manager.add_dummy_lora(request, rank)


def replace_cpu_adapter_products(linear: Callable[..., None], logits: Callable[..., None]) -> None:
    """Replace vLLM's products of adapters on a CPU by functions of ours.

    Assumed: layers call `add_lora_linear`, and heads `add_lora_logits`, of this class. Otherwise vLLM's own run: slow,
    with gigabytes for a long prompt, and without log-probabilities of prompts.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    PunicaWrapperCPU.add_lora_linear = linear
    PunicaWrapperCPU.add_lora_logits = logits
