"""Send weights from trainer rank 0 by any method: a job uses one, and the next one when that fails."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.blocks.sync import SyncMethod
from orchestration.cluster.devices import DeviceSpec
from orchestration.weight_transfer.broadcaster import WeightBroadcaster
from orchestration.weight_transfer.file_publisher import WeightPublisher
from orchestration.weight_transfer.gpu_publisher import GpuPublisher, is_beside_the_only_engine
from rollouts.vllm.weight_broadcast import TransferFailed
from rollouts.vllm.weight_file import TensorInfo


class WeightSender:
    """The sender on trainer rank 0; one per run."""

    def __init__(self, method: SyncMethod, folder: Path, device: DeviceSpec) -> None:
        """Prepare the first method to be used, which is `method`. folder: where `disk` writes.

        Raise ValueError when this machine does not have the method.
        """
        self.folder, self.device = folder, device
        self.publisher: WeightPublisher | GpuPublisher | None = None
        self.broadcast: WeightBroadcaster | None = None
        if method != "nccl":
            self._use_file(method)

    def publish(
        self,
        version: int,
        named_tensors: Iterable[tuple[str, Tensor]],
        adapter: dict[str, Any] | None,
        method: SyncMethod,
        tensors: list[TensorInfo] | None = None,
    ) -> dict[str, Any]:
        """Bring a version to where engines load it; see `WeightPublisher.publish` and `WeightBroadcaster.send`.

        tensors: the descriptions of named_tensors, which a broadcast needs.

        Raise TransferFailed when the transfer breaks off, or this machine does not have the method, and OSError when
        the version cannot be written.
        """
        if method == "nccl":
            if self.broadcast is None:
                raise TransferFailed("no weight group was offered yet")
            assert tensors is not None, "a broadcast without an announcement"
            return self.broadcast.send(version, named_tensors, tensors, adapter)
        try:
            publisher = self._use_file(method)
        except ValueError as error:
            raise TransferFailed(str(error)) from error
        return publisher.publish(version, named_tensors, adapter)

    def _use_file(self, method: SyncMethod) -> WeightPublisher | GpuPublisher:
        assert method != "nccl"
        if self.publisher is None or self.publisher.method != method:
            if self.publisher is not None:
                self.publisher.close()
            if method == "direct" and self.device.device == "cuda" and is_beside_the_only_engine():
                self.publisher = GpuPublisher(torch.device("cuda", torch.cuda.current_device()))
            else:
                self.publisher = WeightPublisher(method, self.folder)
        return self.publisher

    def broadcaster(self, bucket_mib: float) -> WeightBroadcaster:
        """Return the present broadcaster, or a new one."""
        if self.broadcast is None:
            self.broadcast = WeightBroadcaster(self.device, bucket_mib)
        return self.broadcast

    def close(self) -> None:
        """Remove what was written, and leave the group."""
        if self.publisher is not None:
            self.publisher.close()
        if self.broadcast is not None:
            self.broadcast.close()
