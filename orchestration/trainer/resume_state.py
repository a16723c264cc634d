"""All that decides a trainer's next step, on disk: DeepSpeed's optimizer state and float32 weights, counters, random state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from orchestration.trainer.trainer import Trainer

COUNTERS = ("steps", "updates", "skipped_in_a_row")


def save_state(trainer: Trainer, folder: Path) -> None:
    """Write this rank's part into `folder`, which all ranks share. A collective: every rank calls it."""
    folder.mkdir(parents=True, exist_ok=True)
    for engine, name in zip(trainer.engines, ("policy", "critic"), strict=False):
        # A frozen base under adapters is loaded from model.path as before.
        engine.save_checkpoint(str(folder), tag=name, save_latest=False, exclude_frozen_parameters=True)
    state = {
        "ranks": trainer.ranks,
        "counters": {name: getattr(trainer, name) for name in COUNTERS},
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state() if trainer.device.type == "cuda" else None,
    }
    torch.save(state, _rank_file(folder, trainer.rank))
    torch.distributed.barrier()


def load_state(trainer: Trainer, folder: Path) -> None:
    """Make a trainer that was just built from the same settings the one that wrote `folder`. A collective.

    Unpickles what DeepSpeed wrote: open only folders you trust.

    Raises:
        ValueError: there is no state in the folder, or it is of another number of ranks.
    """
    file = _rank_file(folder, 0)
    if not file.is_file():
        raise ValueError(f"{folder} holds no trainer state ({file.name} is missing)")
    ranks = torch.load(file, weights_only=True)["ranks"]
    if ranks != trainer.ranks:
        raise ValueError(f"{folder} was written by {ranks} trainer ranks, now there are {trainer.ranks}; use {ranks}")
    for engine, name in zip(trainer.engines, ("policy", "critic"), strict=False):
        loaded, _ = engine.load_checkpoint(
            str(folder), tag=name, load_module_strict=trainer.settings.lora is None, load_lr_scheduler_states=False
        )
        assert loaded is not None, f"DeepSpeed found no checkpoint in {folder / name}"
    state = torch.load(_rank_file(folder, trainer.rank), weights_only=True)
    for name, value in state["counters"].items():
        setattr(trainer, name, value)
    torch.set_rng_state(state["random"])
    if state["random_cuda"] is not None and trainer.device.type == "cuda":
        torch.cuda.set_rng_state(state["random_cuda"])


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.pt"
