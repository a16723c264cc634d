"""Compute log pi_ref of every example once, with the starting weights, and keep it on disk for the next run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from configs.blocks.supervised import SLConfig
from data_feeds.examples.examples import Example
from orchestration.cluster.launcher_rank import is_first_rank
from orchestration.run.console import Console
from orchestration.supervised.batches import Packing, Reference

if TYPE_CHECKING:
    from orchestration.trainer.trainer import Trainer

EXAMPLES_AT_A_TIME = 256


def reference_logprobs(
    examples: Sequence[Example], trainer: Trainer, packing: Packing, config: SLConfig, console: Console | None
) -> Reference:
    """Return log pi_ref by (group_id, sample), each one float32 array over the trained tokens.

    The reference is the policy before its first step. Every rank calls this with the same examples (a collective) and
    gets the result for all of them.
    """
    path = Path(config.objective.reference_cache_dir) / f"{cache_key(examples, config)}.npz"
    order = [(t.group_id, t.sample) for example in examples for t in example]
    lengths = [t.action_tokens for example in examples for t in example]
    if path.is_file():  # the file is complete, because it was renamed into place
        with np.load(path) as cache:
            flat = cache["logprobs"]
        if console is not None:
            console.note(f"reference log-probabilities of {len(order)} responses from {path}")
    else:
        flat = np.concatenate([_policy_logprobs(examples[i : i + EXAMPLES_AT_A_TIME], trainer, packing)
                               for i in range(0, len(examples), EXAMPLES_AT_A_TIME)])  # fmt: skip
        if is_first_rank():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.stem}.{os.getpid()}.npz")
            np.savez(partial, logprobs=flat)
            os.replace(partial, path)
    assert len(flat) == sum(lengths), "the cache is of other examples"
    return dict(zip(order, np.split(flat, np.cumsum(lengths)[:-1]), strict=True))


def cache_key(examples: Sequence[Example], config: SLConfig) -> str:
    """Return a hash of all that decides the numbers: tokens, which of them are trained, model files, compute type."""
    settings = f"{config.model.dtype} {config.model.float32_head} {config.lora}"
    digest = hashlib.blake2b(settings.encode(), digest_size=16)
    adapter = config.lora.adapter if config.lora is not None else None
    for name in filter(None, (config.model.path, adapter)):
        digest.update(name.encode())
        for file in sorted(Path(name).glob("*.safetensors")) if Path(name).is_dir() else []:
            status = file.stat()
            digest.update(f"{file.resolve()} {status.st_size} {status.st_mtime_ns}".encode())
    for example in examples:
        for t in example:
            for array in (t.prompt_ids, t.token_ids, t.is_action):
                digest.update(np.ascontiguousarray(array).tobytes())
                digest.update(b"|")
    return digest.hexdigest()


def _policy_logprobs(examples: Sequence[Example], trainer: Trainer, packing: Packing) -> np.ndarray:
    """Return log pi of the examples' trained tokens under the current weights, in order, on every rank."""
    batches = packing.of(examples)[trainer.rank]
    own: dict[int, np.ndarray] = {}
    for batch, columns in zip(batches, trainer.recompute(batches, ["old_logprobs"]), strict=True):
        own.update(batch.by_trajectory(columns["old_logprobs"]))
    parts: list[dict[int, np.ndarray]] = [{} for _ in range(trainer.ranks)]
    torch.distributed.all_gather_object(parts, own)
    by_trajectory = {index: values for part in parts for index, values in part.items()}
    return np.concatenate([by_trajectory[i] for i in range(len(by_trajectory))])
