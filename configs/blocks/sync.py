"""The block `sync:`: how new weights reach the engines, and how it is checked that they did."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.blocks.block import Block

SyncMethod = Literal["nccl", "direct", "disk"]


class Sync(Block):
    """How new weights reach the engines, and how it is proven that they did."""

    method: SyncMethod = Field(
        "direct",
        description="nccl: broadcast over a group of its own, on any number of machines (gloo between CPU processes). direct: "
        "shared memory on one machine. disk: files in the run directory. A method that fails is followed by the next of "
        "nccl, direct, disk with schedule.mode sync, and ends the run with overlap.",
    )
    bucket_mib: float = Field(
        256.0,
        gt=0,
        le=16384,
        description="With nccl: engines load weights in buckets of about this many MiB. Between GPUs weights are sent in "
        "them too: two are held on the trainer's device, and two on each engine's.",
    )
    probe_prompts: int = Field(
        4,
        ge=1,
        description="Short continuations whose log-probabilities engine and trainer must agree on after every sync.",
    )
    probe_tokens: int = Field(8, ge=1, description="Tokens generated per probe prompt.")
    probe_tolerance: float | None = Field(
        None,
        gt=0,
        description="Largest mean |log-probability gap| in nats that lets the run go on; empty: 0.002 in float32, 0.15 "
        "in bfloat16.",
    )
