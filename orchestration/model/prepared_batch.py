"""A micro-batch as tensors on the trainer's device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import orchestration.model.packed_attention  # noqa: F401  registers the attention functions
from data_feeds.packing import MicroBatch
from orchestration.model.packed_layout import PackedLayout


@dataclass(frozen=True)
class PreparedBatch:
    """A micro-batch as tensors on the device that will run it. T input tokens, N action tokens, S trajectories."""

    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T]
    layout: PackedLayout
    positions: Tensor  # [U] distinct positions whose hidden state the head sees
    rows: Tensor  # [N] in 0..U-1
    targets: Tensor  # [N] int64
    loss_weights: Tensor  # [N] float32
    sequence: Tensor  # [N] int64 in 0..S-1
    group: Tensor  # [S] int64
    chosen: Tensor | None  # [S] bool, of preference data
    columns: dict[str, Tensor]  # [N] each, as in MicroBatch
    is_dummy: bool


def to_device(batch: MicroBatch, device: str | torch.device) -> PreparedBatch:
    """Return the tensors and attention indices of a micro-batch, made once for all its forward passes."""
    device = torch.device(device)
    if batch.images:
        raise ValueError("this trainer takes text only; the prompts carry images")

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array)).to(device)  # a copy: arrays that came through Ray are read-only

    positions, rows = np.unique(batch.predict, return_inverse=True)
    return PreparedBatch(
        input_ids=tensor(batch.input_ids)[None],
        position_ids=tensor(batch.position_ids)[None],
        layout=PackedLayout(batch.segments, batch.position_ids, device),
        positions=tensor(positions),
        rows=tensor(rows),
        targets=tensor(batch.targets),
        loss_weights=tensor(batch.loss_weights),
        sequence=tensor(batch.sequence),
        group=tensor(batch.group),
        chosen=None if batch.chosen is None else tensor(batch.chosen),
        columns={name: tensor(values) for name, values in batch.columns.items()},
        is_dummy=batch.is_dummy,
    )
