"""A captured step read back."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from algs.method import PolicyMethod
from data_feeds.packing import MicroBatch
from orchestration.metrics.tally import Tally
from orchestration.run.directory import CAPTURED_STEPS
from orchestration.trainer.captured_step import CapturedStep
from orchestration.trainer.settings import TrainerSettings


@dataclass(frozen=True)
class LoadedStep:
    """A captured step read back: every rank's part, and what the ranks together measured when it was live."""

    folder: Path
    parts: tuple[CapturedStep, ...]  # by rank
    live: Tally
    reason: str

    @property
    def method(self) -> PolicyMethod:
        return self.parts[0].method

    @property
    def settings(self) -> TrainerSettings:
        """As they were live, but for the policy, as it was before the update. Nothing is captured again."""
        live, policy = replace(self.parts[0].settings, capture_steps=()), str(self.folder / "policy")
        if live.lora is not None:  # its base was not captured
            return replace(live, lora=live.lora.model_copy(update={"adapter": policy}))
        return replace(live, model=live.model.model_copy(update={"path": policy}))

    @property
    def batches(self) -> list[MicroBatch]:
        """Of all ranks, rank after rank. Dummies, which only keep ranks in step, are left out."""
        return [batch for part in self.parts for batch in part.batches if not batch.is_dummy]

    def values(self) -> dict[str, torch.Tensor]:
        """Parameters of the critic or value head by name; empty where the step had none."""
        file = self.folder / "critic.pt"
        return torch.load(file, map_location="cpu", weights_only=True) if file.is_file() else {}


def load_captured_step(folder: Path) -> LoadedStep:
    """Read a folder that `CapturedStep` wrote. Unpickles: open only folders you trust.

    Raises:
        ValueError: it is no captured step, another version captured it, or the part of a rank is missing.
    """
    if not (folder / "rank_0.pkl").is_file():
        raise ValueError(
            f"{folder} holds no captured step (rank_0.pkl is missing); give one such as "
            "runs/grpo/captured_steps/step_000412_update_0"
        )
    found = [_read(folder / "rank_0.pkl")]
    for rank in range(1, found[0][0].ranks):
        file = folder / f"rank_{rank}.pkl"
        if not file.is_file():
            raise ValueError(f"{file} is missing: the step ran on {found[0][0].ranks} ranks, and all are needed")
        found.append(_read(file))
    live = Tally.merged(tally for _, tally, _ in found)
    return LoadedStep(folder, tuple(step for step, _, _ in found), live, found[0][2])


def _read(file: Path) -> tuple[CapturedStep, Tally, str]:
    """Return a rank's part.

    Raises:
        ValueError: records have changed since it was captured.
    """
    try:
        step, live, reason = pickle.loads(file.read_bytes())
        for record in (step, step.settings, *step.batches):
            for item in fields(record):
                getattr(record, item.name)
    except (AttributeError, ImportError) as error:
        raise ValueError(
            f"{file} does not fit this version of the code ({error}); run it again with the version that captured it, which the "
            "run's environment.json names"
        ) from error
    return step, live, reason


def captured_steps(folder: Path) -> list[Path]:
    """The steps in a folder of captured steps, or in that folder of a run; oldest first."""
    inside = folder / CAPTURED_STEPS if (folder / CAPTURED_STEPS).is_dir() else folder
    return sorted(path.parent for path in inside.glob("step_*_update_*/rank_0.pkl"))
