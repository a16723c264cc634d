"""Read a captured step back."""

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
    """A captured step: every rank's part, and the metrics of all ranks together when it was live."""

    folder: Path
    parts: tuple[CapturedStep, ...]  # by rank
    live: Tally
    reason: str

    @property
    def method(self) -> PolicyMethod:
        return self.parts[0].method

    @property
    def settings(self) -> TrainerSettings:
        """Return the live settings with the captured policy, as it was before the update, and without captures."""
        live, policy = replace(self.parts[0].settings, capture_steps=()), str(self.folder / "policy")
        if live.lora is not None:  # the base model was not captured, only the adapter
            return replace(live, lora=live.lora.model_copy(update={"adapter": policy}))
        return replace(live, model=live.model.model_copy(update={"path": policy}))

    @property
    def batches(self) -> list[MicroBatch]:
        """Return the micro-batches of all ranks, rank after rank, without dummies, which only keep ranks in step."""
        return [batch for part in self.parts for batch in part.batches if not batch.is_dummy]

    def values(self) -> dict[str, torch.Tensor]:
        """Return the parameters of the critic or value head by name; empty when the step had neither."""
        file = self.folder / "critic.pt"
        return torch.load(file, map_location="cpu", weights_only=True) if file.is_file() else {}


def load_captured_step(folder: Path) -> LoadedStep:
    """Read a folder that `CapturedStep` wrote. It is unpickled, so open only folders you trust.

    Raises:
        ValueError: the folder is no captured step, another version captured it, or the part of a rank is missing.
    """
    if not (folder / "rank_0.pkl").is_file():
        raise ValueError(
            f"{folder} holds no captured step (rank_0.pkl is missing); give one such as "
            "runs/grpo/captured_steps/step_000412_update_0"
        )
    first, tally, reason = _read(folder / "rank_0.pkl")
    parts, tallies = [first], [tally]
    for rank in range(1, first.ranks):
        file = folder / f"rank_{rank}.pkl"
        if not file.is_file():
            raise ValueError(f"{file} is missing: the step ran on {first.ranks} ranks, and all are needed")
        part, tally, _ = _read(file)
        parts.append(part)
        tallies.append(tally)
    return LoadedStep(folder, tuple(parts), Tally.merged(tallies), reason)


def _read(file: Path) -> tuple[CapturedStep, Tally, str]:
    """Return a rank's part, its metrics, and why the step was captured.

    Raises:
        ValueError: the records have changed since the step was captured.
    """
    try:
        step, live, reason = pickle.loads(file.read_bytes())
        for record in (step, step.settings, *step.batches):
            for item in fields(record):
                getattr(record, item.name)
    except (AttributeError, ImportError) as error:
        raise ValueError(
            f"{file} does not fit this version of the code ({error}); run it again with the version that captured it, "
            "which the run's environment.json names"
        ) from error
    return step, live, reason


def captured_steps(folder: Path) -> list[Path]:
    """Return the folders of the captured steps in a run or in its folder captured_steps, oldest first."""
    parent = folder / CAPTURED_STEPS if (folder / CAPTURED_STEPS).is_dir() else folder
    return sorted(path.parent for path in parent.glob("step_*_update_*/rank_0.pkl"))
