"""The driver's one handle on all trainer ranks.

Every method on which the ranks work returns a `Call`: the work has begun, and the one who waits for it decides what is
done meanwhile (`Driver.wait` keeps the engines busy, `Watch.wait` does nothing else), until all ranks have answered.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from algs.method import PolicyMethod
from configs.blocks.sync import SyncMethod
from data_feeds.packing import MicroBatch
from orchestration.cluster.cpu_cores import CorePlan
from orchestration.cluster.devices import DeviceSpec, environment_for_trainer
from orchestration.cluster.watchdog import START_SECONDS, Call, TrainerLost, Watch
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

    @classmethod
    def create(
        cls, device: DeviceSpec, run: RunDirectory, options: list[dict[str, Any]], cores: CorePlan, watch: Watch
    ) -> TrainerRanks:  # fmt: skip
        """Start one actor per entry of `options` (Ray actor options); they know one another and have no work yet."""
        environment = environment_for_trainer(device.device, cores.trainer_threads)
        environment["DEEPSPEED_TIMEOUT"] = str(collective_minutes(watch.stall_seconds))
        actors = []
        for rank, placed in enumerate(options):
            actor = ray.remote(concurrency_groups={"heartbeat": 1})(TrainerActor).options(
                **placed, runtime_env={"env_vars": environment}
            )
            actors.append(actor.remote(str(run.log_path(f"trainer_{rank}")), cores.trainer_cores[rank]))
        ranks = cls(actors, watch)
        (address,) = watch.get([actors[0].address.remote()], "start trainer ranks", START_SECONDS)
        for rank, actor in enumerate(actors):
            actor.join.remote(rank, len(actors), address)  # an actor's calls run in order: `begin` waits for it
        return ranks

    def begin(
        self,
        settings: TrainerSettings,
        method: PolicyMethod,
        device: DeviceSpec,
        sync_method: SyncMethod,
        sync_folder: Path,
    ) -> Call[list[Any]]:
        """Begin a job, the first or another one, with a new trainer on every rank."""
        self.sync_folder = sync_folder
        arguments = (settings, method, device, sync_method, str(sync_folder))
        return self._call("begin", "start trainer", *arguments, stall_seconds=START_SECONDS)

    def step(self, updates: list[list[list[MicroBatch]]], step: int) -> Call[tuple[Tally, int]]:
        """Train on a step's updates; updates[u][rank] are the micro-batches of update u.

        The answer is the step's metrics over all ranks, and how many updates in a row were skipped as non-finite.
        """
        self.weights_moved = True
        per_rank = [[update[rank] for update in updates] for rank in range(len(self.actors))]
        calls = [a.step.remote(batches, step) for a, batches in zip(self.actors, per_rank, strict=True)]
        return Call(calls, f"train, step {step}", lambda parts: (Tally.merged(part for part, _ in parts), parts[0][1]))

    def recompute(
        self, per_rank: list[list[MicroBatch]], names: Sequence[str], temperature: float | None = None
    ) -> Call[list[list[dict[str, np.ndarray]]]]:
        """Compute numbers of the action tokens by rank, micro-batch and name; see Trainer.recompute."""
        doing = f"compute {', '.join(names)}"
        calls = [
            a.call.remote(doing, "recompute", batches, names, temperature)
            for a, batches in zip(self.actors, per_rank, strict=True)
        ]
        return Call(calls, doing, list)

    def publish(self, version: int, method: SyncMethod = "direct") -> Call[dict[str, Any]]:
        """Bring the current weights to where engines load them; the answer is the notice by which an engine loads them.
        With nccl the engines must load them at the same time."""
        self.weights_moved = False
        doing = f"{'broadcast' if method == 'nccl' else 'publish'} weights of version {version}"
        return self._call("publish", doing, version, method).then(lambda notices: notices[0])

    def release_memory(self) -> Call[list[Any]]:
        """Give device memory back before an engine wakes that shares the GPU."""
        return self._call("release_memory", "release memory")

    def save(self, folder: Path) -> Call[list[dict[str, int]]]:
        """Write the policy in Hugging Face format; the answer is the sizes of the files that each rank wrote."""
        return self._call("call", f"write {folder}", "write the model", "weights.save", folder)

    def save_state(self, folder: Path) -> Call[list[dict[str, int]]]:
        """Write all that decides the next step, every rank its part, on storage that all ranks share; the answer is the
        sizes of the files that each rank sees."""
        return self._call("call", f"write {folder}", "write the trainer's state", "save_state", folder)

    def load_state(self, folder: Path) -> Call[list[Any]]:
        """Continue where `save_state` was called, with ranks that have not trained yet; the wait raises ValueError when
        the state does not fit."""
        reading = ("read the trainer's state", "load_state", folder)
        return self._call("call", f"read {folder}", *reading, stall_seconds=START_SECONDS)

    def close(self) -> Call[list[Any]]:
        """End the trainers in an orderly way."""
        return self._call("close", "close the trainer")

    def abandon(self) -> None:
        """End the actors at once, and remove the weights that rank 0 may have left on disk."""
        for member in self.members:
            self.watch.end(member)
        if self.sync_folder is not None:
            shutil.rmtree(self.sync_folder, ignore_errors=True)

    def _call(self, what: str, doing: str, *arguments: Any, stall_seconds: float | None = None) -> Call[list[Any]]:
        """Begin the same call on every rank."""
        return Call([getattr(actor, what).remote(*arguments) for actor in self.actors], doing, list, stall_seconds)


def collective_minutes(stall_seconds: float) -> int:
    """Return how many minutes a rank waits for the others in a collective before it gives up by itself.

    The watchdog, which names the rank at fault, waits less. DeepSpeed's own ten minutes would end a slow start-up.
    """
    return math.ceil(max(stall_seconds, START_SECONDS) / 60) + 1
