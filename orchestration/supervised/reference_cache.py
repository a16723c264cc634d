"""log pi_ref of every example, computed once with the starting weights and kept on disk for the next run."""

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
    """log pi_ref by (group_id, sample), one float32 array of the trained tokens each. The reference is the policy before its
    first step. A collective: every rank calls it with the same examples, and gets all of them."""
    path = Path(config.objective.reference_cache_dir) / f"{fingerprint(examples, config)}.npz"
    order = [(t.group_id, t.sample) for example in examples for t in example]
    lengths = [t.action_tokens for example in examples for t in example]
    if path.is_file():  # complete: it was renamed into place
        with np.load(path) as kept:
            flat = kept["logprobs"]
        if console is not None:
            console.note(f"reference log-probabilities of {len(order)} responses from {path}")
    else:
        flat = np.concatenate([_of(examples[i : i + EXAMPLES_AT_A_TIME], trainer, packing)
                               for i in range(0, len(examples), EXAMPLES_AT_A_TIME)])  # fmt: skip
        if is_first_rank():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.stem}.{os.getpid()}.npz")
            np.savez(partial, logprobs=flat)
            os.replace(partial, path)
    assert len(flat) == sum(lengths), "the cache is of other examples"
    return dict(zip(order, np.split(flat, np.cumsum(lengths)[:-1]), strict=True))


def fingerprint(examples: Sequence[Example], config: SLConfig) -> str:
    """Of everything that decides the numbers: every token, which are trained, the model's files and the compute type."""
    computed = f"{config.model.dtype} {config.model.float32_head} {config.lora}"
    digest = hashlib.blake2b(computed.encode(), digest_size=16)
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


def _of(examples: Sequence[Example], trainer: Trainer, packing: Packing) -> np.ndarray:
    """log pi of the examples' trained tokens under the current weights, in order, on every rank."""
    batches = packing.of(examples)[trainer.rank]
    own: dict[int, np.ndarray] = {}
    for batch, columns in zip(batches, trainer.recompute(batches, ["old_logprobs"]), strict=True):
        own.update(batch.by_trajectory(columns["old_logprobs"]))
    parts: list[dict[int, np.ndarray]] = [{} for _ in range(trainer.ranks)]
    torch.distributed.all_gather_object(parts, own)
    found = {index: values for part in parts for index, values in part.items()}
    return np.concatenate([found[i] for i in range(len(found))])
