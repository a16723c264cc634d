"""The driver's one handle on all trainer ranks."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from algs.method import PolicyMethod
from configs.blocks.sync import SyncMethod
from data_feeds.packing import MicroBatch
from orchestration.cluster.cpu_cores import CorePlan
from orchestration.cluster.devices import DeviceSpec, environment_for_trainer
from orchestration.cluster.watchdog import START_SECONDS, TrainerLost, Watch
from orchestration.metrics.tally import Tally
from orchestration.run.directory import RunDirectory
from orchestration.trainer.actor import TrainerActor
from orchestration.trainer.settings import TrainerSettings


class TrainerRanks:
    """All ranks, driven together."""

    def __init__(self, actors: list[Any], watch: Watch) -> None:
        self.watch = watch
        self.members = [watch.add(f"trainer rank {rank}", actor, TrainerLost) for rank, actor in enumerate(actors)]
        self.actors = actors
        self.sync_folder: Path | None = None
        self.weights_moved = False  # a step began after the last `publish`
        self.meanwhile: Callable[[], None] | None = None  # what the driver does while it waits for ranks; see Watch.get

    @classmethod
    def create(
        cls, device: DeviceSpec, run: RunDirectory, options: list[dict[str, Any]], cores: CorePlan, watch: Watch
    ) -> TrainerRanks:  # fmt: skip
        """One actor per entry of `options` (Ray actor options), which know one another and have nothing to do yet."""
        environment = environment_for_trainer(device.device, cores.trainer_threads)
        environment["DEEPSPEED_TIMEOUT"] = str(collective_minutes(watch.stall_seconds))
        actors = []
        for rank, placed in enumerate(options):
            actor = ray.remote(concurrency_groups={"beat": 1})(TrainerActor).options(
                **placed, runtime_env={"env_vars": environment}
            )
            actors.append(actor.remote(str(run.log_path(f"trainer_{rank}")), cores.trainer_cores[rank]))
        group = cls(actors, watch)
        (address,) = group.watch.get([actors[0].address.remote()], "start trainer ranks", stall_seconds=START_SECONDS)
        for rank, actor in enumerate(actors):
            actor.join.remote(rank, len(actors), address)  # an actor's calls run in order: `begin` waits for it
        return group

    def begin(
        self,
        settings: TrainerSettings,
        method: PolicyMethod,
        device: DeviceSpec,
        sync_method: SyncMethod,
        sync_folder: Path,
    ) -> list[Any]:
        """Begin a job, the first or another: a new trainer on every rank. Returns the futures of their start-up."""
        self.sync_folder = sync_folder
        return [a.begin.remote(settings, method, device, sync_method, str(sync_folder)) for a in self.actors]

    def step(self, updates: list[list[list[MicroBatch]]], step: int) -> tuple[Tally, int]:
        """updates[u][rank] are the micro-batches of optimizer step u; returns the step's metrics over all ranks, and how
        many updates in a row were skipped because something in them was not finite.

        Raises: TrainerLost, as every method here.
        """
        per_rank = [[update[rank] for update in updates] for rank in range(len(self.actors))]
        self.weights_moved = True
        calls = [a.step.remote(batches, step) for a, batches in zip(self.actors, per_rank, strict=True)]
        parts = self._get(calls, f"train, step {step}")
        return Tally.merged(part for part, _ in parts), parts[0][1]

    def recompute(
        self, per_rank: list[list[MicroBatch]], names: Sequence[str], temperature: float | None = None
    ) -> list[list[dict[str, np.ndarray]]]:
        """Numbers of the action tokens of every rank's micro-batches under the current weights; see Trainer.recompute."""
        doing = f"compute {', '.join(names)}"
        calls = [
            a.call.remote(doing, "recompute", batches, names, temperature)
            for a, batches in zip(self.actors, per_rank, strict=True)
        ]
        return self._get(calls, doing)

    def publish(self, version: int, method: SyncMethod = "direct") -> dict[str, Any]:
        """Make the current weights available to engines in a file; returns what an engine needs to take them."""
        assert method != "nccl", "nobody takes them: WeightSync has engines take them at the same time"
        return self._get(self.begin_publish(version, method), f"publish version {version}")[0]

    def begin_publish(self, version: int, method: SyncMethod) -> list[Any]:
        """The futures of `publish`: with nccl engines have to take the weights at the same time."""
        self.weights_moved = False
        return [actor.publish.remote(version, method) for actor in self.actors]

    def release_memory(self) -> None:
        """Before an engine that shares the GPU wakes."""
        self._get([actor.release_memory.remote() for actor in self.actors], "release memory")

    def save(self, folder: Path) -> None:
        self._get(self._call_all("write the model", "weights.save", folder), f"write {folder}")

    def save_state(self, folder: Path) -> None:
        """Write what decides the next step, every rank its part; the folder is on storage that all ranks share."""
        self._get(self._call_all("write the trainer's state", "save_state", folder), f"write {folder}")

    def load_state(self, folder: Path) -> None:
        """Go on where `save_state` was called, with ranks that have not trained yet. Raises: ValueError."""
        calls = self._call_all("read the trainer's state", "load_state", folder)
        self.watch.get(calls, f"read {folder}", self.meanwhile, stall_seconds=START_SECONDS)

    def close(self) -> None:
        self._get([actor.close.remote() for actor in self.actors], "close the trainer")

    def _call_all(self, doing: str, method: str, *arguments: Any) -> list[Any]:
        """Return the futures of a method of every rank's trainer; see TrainerActor.call."""
        return [actor.call.remote(doing, method, *arguments) for actor in self.actors]

    def _get(self, calls: list[Any], doing: str) -> list[Any]:
        return self.watch.get(calls, doing, self.meanwhile)

    def abandon(self) -> None:
        """End the actors at once, and remove the weights that rank 0 may have left on disk."""
        for member in self.members:
            self.watch.end(member)
        if self.sync_folder is not None:
            shutil.rmtree(self.sync_folder, ignore_errors=True)


def collective_minutes(stall_seconds: float) -> int:
    """How long a rank waits for the others in a collective before it gives up by itself: longer than the watchdog waits, which
    names the one to blame. DeepSpeed's own default, ten minutes, would end a slow start-up."""
    return math.ceil(max(stall_seconds, START_SECONDS) / 60) + 1
