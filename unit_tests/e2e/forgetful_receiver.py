"""A receiver that can be told to keep old weights, all or some: what the check after a load must find, at any step."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, cat
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from rollouts.vllm.weight_receiver import ReceiverExtension, WeightReceiver


class ForgetfulReceiver(WeightReceiver):
    forgets = ""  # "head": repacking the tied head, as vLLM's own reload does on CPU; "update": all of it
    keeps: tuple[str, int, int] | None = None  # layers' names as an expression, and rows: old ones stay there

    def repack_tied_heads(self) -> None:
        if self.forgets != "head":
            super().repack_tied_heads()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if self.forgets == "update":
            self.failure = None
            return
        before = {name: layer for name, layer in self.model.named_modules() if self._keeps(name)}
        old = {name: (getattr(one, "cpu_linear", None), weights(one)) for name, one in before.items()}
        super().update_weights(update_info)
        for name, (product, tensors) in old.items():
            _, first, end = self.keeps
            for parameter, tensor in tensors.items():
                getattr(before[name], parameter).data[first:end] = tensor[first:end]
            if product is not None:
                before[name].cpu_linear = mixed(before[name].cpu_linear, product, first, end)

    def _keeps(self, name: str) -> bool:
        return self.keeps is not None and re.fullmatch(self.keeps[0], name) is not None


def weights(layer: Any) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in layer.named_parameters(recurse=False)}


def mixed(new: Callable[..., Tensor], old: Callable[..., Tensor], first: int, end: int) -> Callable[..., Tensor]:
    """A product with some rows of the old weight."""

    def product(x: Tensor, weight: Any, bias: Any) -> Tensor:
        by_new, by_old = new(x, weight, bias), old(x, weight, bias)
        return cat([by_new[..., :first], by_old[..., first:end], by_new[..., end:]], -1)

    return product


class ForgetfulExtension(ReceiverExtension):
    """Named as vLLM's `worker_extension_cls`."""

    def forget(self, what: str, keeps: tuple[str, int, int] | None = None, rank: int = 0) -> None:
        receiver = self.weight_transfer_engine
        is_meant = receiver.parallel_config.rank == rank
        receiver.forgets, receiver.keeps = (what, keeps) if is_meant else ("", None)

    def skip_reading_back(self, skips: bool) -> None:
        self.skips = skips

    def read_back(self, version: int) -> tuple[float, list[str]]:
        return (1.0, []) if getattr(self, "skips", False) else super().read_back(version)

    def borrowed(self) -> list[str]:
        """Parameters and buffers that lie in the mapped file."""
        model, mapped = self.weight_transfer_engine.model, self.weight_transfer_engine.file._data
        assert len(mapped), "nothing was loaded from a file yet"
        return [
            name
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
            if 0 <= tensor.data_ptr() - mapped.data_ptr() < len(mapped)
        ]


WeightTransferEngineFactory.register_engine("forgetful", ForgetfulReceiver)
