"""In vLLM's workers, open or receive new weights, load and check them, or refuse them.

One receiver, which vLLM knows as the weight-transfer backend "feynrl", takes the updates of every method, so that a job
can fall back from one to another. `ReceiverExtension` is given to vLLM as `worker_extension_cls`: it makes workers
import this module, which registers the receiver. An update holds a whole model, or an adapter for an engine that was
started with room for one.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.logger import init_logger

from rollouts.vllm import internals
from rollouts.vllm.adapter_receiver import adapter_request, checked_adapter, differing_factors
from rollouts.vllm.load_stamp import stamping
from rollouts.vllm.resident_weights import ResidentWeights
from rollouts.vllm.weight_broadcast import Load, TransferFailed, WeightGroup, join_group, receive, receive_announcement
from rollouts.vllm.weight_file import Checksum, FileUpdate, Named, TensorInfo, WeightFile, refuse_other_bytes

logger = init_logger(__name__)

BACKEND = "feynrl"


@dataclass
class JoinGroup(WeightTransferInitInfo):
    """What `orchestration.rl.weight_sync.WeightSync` tells the engines of a broadcast group. Files need no group."""

    host: str
    port: int
    backend: str  # "gloo" or "nccl"
    first_rank: int  # of this engine's workers
    size: int  # members of the group, the trainer's one included
    timeout_seconds: float
    join_seconds: float


@dataclass
class GpuUpdate:
    """What `orchestration.weight_transfer.gpu_publisher.GpuPublisher.publish` returns."""

    version: int
    gpu: str  # the UUID, which is the same in every process; numbers are not
    tensors: list[dict[str, Any]]  # `TensorInfo` of each
    handles: bytes  # pickled; see `internals.ipc_handle`
    size_bytes: int
    checksum: int
    adapter: dict[str, Any] | None = None  # PEFT's configuration when the tensors are an adapter's


@dataclass
class BroadcastUpdate(WeightTransferUpdateInfo):
    """A version that trainer rank 0 is about to broadcast."""

    version: int


class WeightReceiver(WeightTransferEngine[JoinGroup, BroadcastUpdate]):
    """One worker's receiving side. A whole update arrives in one call, so start and finish have nothing to do.

    Failures are not raised to vLLM, which reads the error of one worker and takes the errors of the others for the
    answers to its next calls. They are left in `failure`; the engine asks every worker, through
    `ReceiverExtension.weight_failure`.
    """

    init_info_cls = JoinGroup
    update_info_cls = BroadcastUpdate

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.tied = internals.tied_heads(self.model)
        self.failure: str | None = None
        self.adapter: Any = None  # checked, to be activated
        self.came: tuple[dict[str, Tensor], dict[str, Any]] | None = None  # the adapter's tensors and configuration
        self.resident = ResidentWeights(self.model, self.device, self.tied)
        self.group: WeightGroup | None = None
        self.file = WeightFile()
        self.stamped = stamping()

    def init_transfer_engine(self, init_info: JoinGroup) -> None:
        """Join a broadcast group, and leave the one before."""
        self.shutdown()
        options = asdict(init_info)
        rank = options.pop("first_rank") + self.parallel_config.rank
        try:
            self.group = join_group(**options, rank=rank, device=self.device)
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
        """Load a version, or write the reason why it was refused into `failure`."""
        try:
            if "path" in update_info:
                in_file = FileUpdate(**update_info)
                self._take_shared(self.file.tensors(in_file), in_file)
            elif "gpu" in update_info:
                on_gpu = GpuUpdate(**update_info)
                self._take_shared(self._opened(on_gpu), on_gpu)
            else:
                self._take_broadcast(BroadcastUpdate(**update_info).version)
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            self.failure = None
        except Exception as error:
            logger.exception("weight update refused")
            self.failure = f"{type(error).__name__}: {error}"
            self.shutdown()  # a sender in the middle of a broadcast sees that
            self.file = WeightFile()

    def receive_weights(self, update_info: BroadcastUpdate) -> None:
        raise AssertionError("update_weights does not call it")

    def _opened(self, update: GpuUpdate) -> list[Named]:
        """Return the tensors in the trainer's GPU memory. Raise ValueError when it is not this worker's GPU."""
        rows = [TensorInfo(**row) for row in update.tensors]
        handles = pickle.loads(update.handles)  # from the trainer, like everything that Ray brings
        return internals.open_over_ipc(self, [(row.name, row.kind) for row in rows], handles, update.gpu)

    def _take_shared(self, tensors: list[Named], update: FileUpdate | GpuUpdate) -> None:
        """Load tensors that lie in memory, or in a file, that the sender may write to."""
        with self._loading(update.version, update.adapter) as load:
            load(tensors)
        where = f"of {update.path}" if isinstance(update, FileUpdate) else f"on GPU {update.gpu}"
        refuse_other_bytes(
            where, Checksum(tensors).value(), update.checksum
        )  # all was copied: a later write is harmless

    def _take_broadcast(self, version: int) -> None:
        if self.group is None:
            raise TransferFailed("this worker is in no weight group")
        announcement = receive_announcement(self.group, version)
        with self._loading(version, announcement.adapter) as load:
            receive(self.group, announcement, load)

    @contextmanager
    def _loading(self, version: int, adapter: dict[str, Any] | None) -> Iterator[Load]:
        """Yield a function that loads tensors as they come; check at the end that the version is whole.

        adapter: PEFT's configuration when the tensors are an adapter's, which is kept for `activate_adapter`.

        Raise ValueError when the tensors do not make up this model, or an adapter of it. The model is then a mixture
        and must not generate until a whole update has been loaded.
        """
        names: set[str] = set()

        def new(tensors: list[Named]) -> Iterator[Named]:
            for name, _ in tensors:
                if name in names:
                    raise ValueError(f"{name} was sent twice")
                names.add(name)
            return iter(self.stamped(tensors))

        if adapter is not None:
            kept: list[Named] = []
            yield lambda tensors: kept.extend((name, tensor.clone()) for name, tensor in new(tensors))
            self.adapter = checked_adapter(self.model, {name: tensor.clone() for name, tensor in kept}, adapter)
            self.came, self.resident.version = (dict(kept), adapter), version
        elif internals.takes_adapters(self.model):
            raise ValueError("a whole model came to an engine that takes adapters")
        else:
            internals.begin_reload(self.model)
            with self.resident.noting(version):
                try:
                    yield lambda tensors: self.model.load_weights(new(tensors))
                    incomplete = internals.incomplete_layers(self.model, self.tied)
                finally:
                    internals.finish_reload(self.model, self.model_config)
                    self.repack_tied_heads()
            if incomplete:
                raise ValueError(f"{len(names)} tensors came, but these layers lack elements: {', '.join(incomplete)}")

    def repack_tied_heads(self) -> None:
        """Give heads that share their weight with the embedding the new one; see `internals.repack_tied_heads`."""
        internals.repack_tied_heads(self.tied, self.device)


class ReceiverExtension:
    """The methods that are added to vLLM's worker class."""

    weight_transfer_engine: WeightReceiver  # vLLM's own attributes
    model_runner: Any

    def weight_failure(self) -> str | None:
        """Return why this worker refused the last update, or could not join the last group; None when it succeeded."""
        return self.weight_transfer_engine.failure

    def read_back(self, version: int) -> tuple[float, list[str]]:
        """Compare what this worker computes with to what came as `version`; see `ResidentWeights.read_back`."""
        receiver = self.weight_transfer_engine
        if receiver.resident.version != version:
            return 0.0, [f"everything: version {receiver.resident.version} came last, not {version}"]
        if receiver.came is not None:
            return 1.0, differing_factors(receiver.model, *receiver.came)
        return receiver.resident.read_back()

    def begin_adapter(self, rank: int) -> None:
        """Hold an adapter of zeros, so that requests made before the first update already use one."""
        internals.hold_empty_adapter(self.model_runner, adapter_request(), rank)

    def activate_adapter(self) -> None:
        """Use the adapter that came with the last update. This is a call of its own because vLLM drops every adapter at
        the end of an update."""
        receiver = self.weight_transfer_engine
        assert receiver.adapter is not None
        internals.replace_adapter(receiver.model, receiver.adapter)
        receiver.adapter = None


WeightTransferEngineFactory.register_engine(BACKEND, WeightReceiver)
