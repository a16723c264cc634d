"""Inside vLLM's workers: new weights are taken from a memory-mapped file or from a broadcast, checked and loaded, or refused.

One receiver, which vLLM knows as the weight-transfer backend "feynrl", takes every method's updates, so that a job can fall
back from one method to another. `ReceiverExtension` is given to vLLM as `worker_extension_cls`: it makes workers import this
module, which registers the receiver. An update holds a whole model, or an adapter for an engine that was started with room for one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.logger import init_logger
from vllm.lora.lora_model import LoRAModel
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from rollouts.vllm.adapter_receiver import activate, adapter_request, checked_adapter
from rollouts.vllm.gpu_memory import DeviceUpdate, DeviceVersion
from rollouts.vllm.load_stamp import stamping
from rollouts.vllm.transfer_group import TransferFailed, TransferGroup
from rollouts.vllm.weight_file import FileUpdate, WeightFile
from rollouts.vllm.weight_stream import Bucket, received

logger = init_logger(__name__)

BACKEND = "feynrl"


@dataclass
class JoinGroup(WeightTransferInitInfo):
    """What `orchestration.rl.weight_sync.WeightSync` tells the engines of a broadcast group; files need no rendezvous."""

    host: str
    port: int
    backend: str  # "gloo" or "nccl"
    first_rank: int  # of this engine's workers
    size: int  # members of the group, the trainer's one included
    timeout_seconds: float
    join_seconds: float


@dataclass
class BroadcastUpdate(WeightTransferUpdateInfo):
    """A version that trainer rank 0 is about to broadcast."""

    version: int


class WeightReceiver(WeightTransferEngine[JoinGroup, FileUpdate]):
    """One worker's receiving side. A whole update arrives in one call, so start and finish have nothing to do.

    Failures are not raised to vLLM: of several workers' errors it reads one, and takes the others for the answers to its
    next calls. They are left in `failure`; the engine asks every worker, through `ReceiverExtension.weight_failure`.
    """

    init_info_cls = JoinGroup
    update_info_cls = FileUpdate

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.tied = tied_heads(self.model)
        self.failure: str | None = None
        self.adapter: LoRAModel | None = None  # checked, to be activated
        self.group: TransferGroup | None = None
        self.file = WeightFile()
        self.stamped = stamping()

    def init_transfer_engine(self, init_info: JoinGroup) -> None:
        """Join a broadcast group in place of the one before."""
        self.shutdown()
        told = asdict(init_info)
        rank = told.pop("first_rank") + self.parallel_config.rank
        try:
            self.group = TransferGroup(**told, rank=rank, device=self.device)
            self.failure = None
        except TransferFailed as error:
            logger.exception("weight group not joined")
            self.failure = f"{type(error).__name__}: {error}"

    def start_weight_update(self) -> None:
        pass

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        """Leave the broadcast group."""
        if self.group is not None:
            self.group.close()
            self.group = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a version, or leave the reason why not in `failure`."""
        try:
            if "path" in update_info:
                update = self.parse_update_info(update_info)
                self.take(iter([Bucket(self.file.tensors(update), update.adapter)]))
                self.file.check(update)
            elif "gpu" in update_info:
                shared = DeviceVersion(DeviceUpdate(**update_info), self.device)
                self.take(shared.buckets())
                shared.check()
            elif self.group is None:
                raise TransferFailed("this worker is in no weight group")
            else:
                self.take(received(self.group, BroadcastUpdate(**update_info).version))
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            self.failure = None
        except Exception as error:
            logger.exception("weight update refused")
            self.failure = f"{type(error).__name__}: {error}"
            self.shutdown()  # a sender in the middle of a broadcast sees that

    def receive_weights(self, update_info: FileUpdate) -> None:
        raise AssertionError("update_weights does not call it")

    def take(self, buckets: Iterator[Bucket]) -> None:
        """Load a whole model, or keep a checked adapter for `ReceiverExtension.activate_adapter`. Raises ValueError."""
        first = next(buckets)
        if first.adapter is not None:
            named = [pair for bucket in chain([first], buckets) for pair in self.stamped(bucket.tensors)]
            if len(dict(named)) != len(named):
                raise ValueError("a part of the adapter was sent twice")
            self.adapter = checked_adapter(self.model, named, first.adapter)
        elif hasattr(self.model, "lora_manager"):
            raise ValueError("a whole model came to an engine that takes adapters")
        else:
            self.load(bucket.tensors for bucket in chain([first], buckets))

    def load(self, parts: Iterable[list[tuple[str, Tensor]]]) -> None:
        """Load the tensors, check that nothing was left out.

        Raises what `parts` raises, and ValueError: the tensors do not make up this model. The model is then a mixture
        and must not generate; a later whole update mends it. What `parts` raises first leaves the model untouched.
        """
        names: set[str] = set()
        initialize_layerwise_reload(self.model)
        try:
            for named in parts:
                for name, _ in named:
                    if name in names:
                        raise ValueError(f"{name} was sent twice")
                    names.add(name)
                self.model.load_weights(self.stamped(named))
            incomplete = incomplete_layers(self.model, except_heads={id(head) for head, _ in self.tied})
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
            self.repack_tied_heads()
        if incomplete:
            raise ValueError(f"{len(names)} tensors came, but these layers lack elements: {', '.join(incomplete)}")

    def repack_tied_heads(self) -> None:
        """Give a language-model head that shares its weight with the embedding the new weight.

        On CPU vLLM packs linear weights after loading; its layerwise reload repacks every layer except a tied head,
        which would go on computing with the old weights without any error. The embedding is packed too, as a head would be.
        """
        for head, embedding in self.tied:
            head.weight = embedding.weight
            if self.device.type == "cpu":
                head.cpu_linear = embedding.cpu_linear


def tied_heads(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """(head, embedding) pairs of a loaded model that share one weight."""
    embeddings = [m for m in model.modules() if type(m) is VocabParallelEmbedding]
    heads = [m for m in model.modules() if isinstance(m, ParallelLMHead)]
    return [(h, e) for h in heads for e in embeddings if h.weight is e.weight]


def incomplete_layers(model: nn.Module, except_heads: set[int]) -> list[str]:
    """Names of layers that received fewer elements than they hold, between a layerwise load and its finalisation.

    vLLM itself would fill the rest with whatever is in memory. Counting elements (per shard, after name mapping)
    needs no list of checkpoint names. No loss: rows that pad the vocabulary, attention layers (they have no weights),
    and the tied heads in `except_heads` (by id).
    """
    incomplete = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or id(layer) in except_heads or is_deferred_attention_layer(layer):
            continue  # complete layers are processed at once and no longer loading
        expected = sum(p.numel() for p in layer.parameters(recurse=False))
        if isinstance(layer, VocabParallelEmbedding):
            padding = layer.num_embeddings_per_partition - layer.shard_indices.num_org_elements
            expected -= padding * layer.embedding_dim
        if info.load_numel < expected:
            incomplete.append(f"{name} ({info.load_numel} of {expected})")
    return incomplete


class ReceiverExtension:
    """Mixed into vLLM's worker class."""

    weight_transfer_engine: WeightReceiver  # vLLM's own attributes
    model_runner: Any

    def weight_failure(self) -> str | None:
        """Why this worker refused the last update, or could not join the last group; None when it did."""
        return self.weight_transfer_engine.failure

    def begin_adapter(self, rank: int) -> None:
        """Hold an adapter of zeros, so that requests made before the first update use one already."""
        self.model_runner.lora_manager.add_dummy_lora(adapter_request(), rank)

    def activate_adapter(self) -> None:
        """Use the adapter that came with the last update. Apart, because vLLM drops every adapter at an update's end."""
        receiver = self.weight_transfer_engine
        assert receiver.adapter is not None
        activate(receiver.model, receiver.adapter)
        receiver.adapter = None


WeightTransferEngineFactory.register_engine(BACKEND, WeightReceiver)
