"""Give a model's tensors the names and shapes that its checkpoint has, and engines know.

transformers keeps some models otherwise in memory: the matrices of all experts of a layer are one tensor there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

Named = tuple[str, Tensor]


def as_in_checkpoint(hf_model: Any, tensors: Iterable[Named]) -> Iterator[Named]:
    """Yield tensors as `save_pretrained` would name and split them, one tensor in memory at a time.

    Raises:
        ValueError: a tensor of the checkpoint would take several of the model's.
    """
    from transformers.core_model_loading import WeightConverter, revert_weight_conversion

    conversions = getattr(hf_model, "_weight_conversions", None) or ()
    if any(isinstance(c, WeightConverter) and len(c.reverse_transform().source_patterns) > 1 for c in conversions):
        raise ValueError(
            f"{type(hf_model).__name__} keeps one tensor of its checkpoint as several, which cannot be sent to engines "
            "one by one; take another model"
        )
    for name, tensor in tensors:
        if conversions:
            yield from ((n, t.contiguous()) for n, t in revert_weight_conversion(hf_model, {name: tensor}).items())
        else:
            yield name, tensor


def saved_buffers(hf_model: nn.Module) -> Iterator[Named]:
    """Yield what a checkpoint holds beside parameters, such as the bias by which a router picks experts."""
    for prefix, module in hf_model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".replace(".base_layer.", "."), buffer
