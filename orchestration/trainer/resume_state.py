"""Save all that decides a trainer's next step: DeepSpeed's optimizer state, float32 weights, counters, randomness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from orchestration.run.checksums import sizes

NAMES = ("policy", "critic")  # of the DeepSpeed engines, in order


@dataclass
class Counters:
    """The number of steps and updates that a trainer has done so far, resumed runs included."""

    steps: int = 0
    updates: int = 0
    skipped_in_a_row: int = 0  # updates, up to the last one


def save_state(folder: Path, ds_engines: Sequence[Any], counters: Counters, device: torch.device) -> dict[str, int]:
    """Write this rank's part into `folder`, which all ranks share; return the size of each file that this rank then
    sees there, by its path within the folder. A collective: every rank calls it."""
    folder.mkdir(parents=True, exist_ok=True)
    for ds_engine, name in zip(ds_engines, NAMES, strict=False):
        # A frozen base under adapters is loaded from model.path as before.
        ds_engine.save_checkpoint(str(folder), tag=name, save_latest=False, exclude_frozen_parameters=True)
    state = {
        "ranks": torch.distributed.get_world_size(),
        "counters": asdict(counters),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state() if device.type == "cuda" else None,
    }
    torch.save(state, _rank_file(folder, torch.distributed.get_rank()))
    torch.distributed.barrier()
    return sizes(folder)


def load_state(folder: Path, ds_engines: Sequence[Any], device: torch.device) -> Counters:
    """Bring a trainer that was just built from the same settings to the state in `folder`, and return its counters. A
    collective.

    This unpickles what DeepSpeed wrote: open only folders you trust.

    Raises:
        ValueError: there is no state in the folder, or it is of another number of ranks.
    """
    file = _rank_file(folder, 0)
    if not file.is_file():
        raise ValueError(f"{folder} holds no trainer state ({file.name} is missing)")
    before, now = torch.load(file, weights_only=True)["ranks"], torch.distributed.get_world_size()
    if before != now:
        raise ValueError(f"{folder} was written by {before} trainer ranks, now there are {now}; use {before}")
    for ds_engine, name in zip(ds_engines, NAMES, strict=False):
        is_whole = all(p.requires_grad for p in ds_engine.module.parameters())
        loaded, _ = ds_engine.load_checkpoint(
            str(folder), tag=name, load_module_strict=is_whole, load_lr_scheduler_states=False
        )
        assert loaded is not None, f"DeepSpeed found no checkpoint in {folder / name}"
    state = torch.load(_rank_file(folder, torch.distributed.get_rank()), weights_only=True)
    torch.set_rng_state(state["random"])
    if state["random_cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["random_cuda"])
    return Counters(**state["counters"])


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.pt"
