"""Write one update to disk, whole: each rank's micro-batches, the weights before it, and its live metrics."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from algs.method import PolicyMethod
from data_feeds.packing import MicroBatch
from orchestration.metrics.tally import Tally
from orchestration.trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from orchestration.trainer.weights import TrainedWeights


@dataclass(frozen=True)
class CapturedStep:
    """One rank's part of one update. Its micro-batches hold what was computed before (advantages, pi_old, values)."""

    step: int
    update: int  # within the step
    rank: int
    ranks: int
    steps_done: int  # by this trainer, before the step
    updates_done: int
    settings: TrainerSettings
    method: PolicyMethod
    batches: list[MicroBatch]
    device: str = "cpu"  # its type
    threads: int = field(default_factory=torch.get_num_threads)  # sums on a CPU depend on how many share the work

    @property
    def folder(self) -> Path:
        return Path(self.settings.capture_folder) / f"step_{self.step:06d}_update_{self.update}"

    def save_weights(self, weights: TrainedWeights) -> None:
        """Write the policy in Hugging Face format (only the adapters if it has some), and beside it the value head or
        critic. A collective: every rank calls it."""
        weights.save(self.folder / "policy")
        values = weights.value_parameters()
        if self.rank == 0 and values:
            torch.save(values, self.folder / "critic.pt")

    def save_batch(self, live: Tally, reason: str) -> None:
        """Write this rank's micro-batches and its part of the live metrics; then remove the oldest captured steps."""
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f"rank_{self.rank}.partial"
        partial.write_bytes(pickle.dumps((self, live, reason)))
        partial.rename(self.folder / f"rank_{self.rank}.pkl")
        if self.rank == 0:
            folders = sorted(p for p in self.folder.parent.glob("step_*_update_*") if (p / "rank_0.pkl").is_file())
            for old in folders[: -self.settings.capture_keep]:
                shutil.rmtree(old)
