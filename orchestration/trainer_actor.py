"""The trainer ranks as Ray actors, and the driver's one handle on all of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import ray

from algs.method import PolicyMethod
from data_feeds.packing import MicroBatch
from orchestration.devices import DeviceSpec, environment_for_trainer, free_port
from orchestration.logs import redirect_output_to
from orchestration.metrics import Tally
from orchestration.run_directory import RunDirectory
from orchestration.trainer_settings import TrainerSettings
from orchestration.weight_sync import WeightPublisher

SyncMethod = Literal["direct", "disk"]


class TrainerActor:
    """One rank in a process of its own. Constructed empty, so that rank 0's address is known before anyone connects."""

    def __init__(self, log_file: str) -> None:
        redirect_output_to(log_file)
        self.publisher: WeightPublisher | None = None  # of rank 0

    def address(self) -> tuple[str, int]:
        """This node's address and a free port on it, for the ranks' rendezvous."""
        return ray.util.get_node_ip_address(), free_port()

    def join(self, rank: int, ranks: int, address: tuple[str, int]) -> None:
        """Take a place among the ranks, for the life of this process."""
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0", MASTER_ADDR=address[0], MASTER_PORT=str(address[1])
        )  # Ray shows an actor only its own GPUs, so the local rank is always 0
        self.is_first = rank == 0

    def begin(
        self,
        settings: TrainerSettings,
        method: PolicyMethod,
        device: DeviceSpec,
        sync_method: SyncMethod,
        sync_folder: str,
    ) -> None:
        """Connect to the other ranks, load the model, wrap it in DeepSpeed. A job that went before is forgotten; the
        connection stays."""
        from orchestration.trainer import Trainer  # DeepSpeed is imported in actors only

        self.close()
        self.trainer = Trainer(settings, method, device)
        self.publisher = WeightPublisher(sync_method, Path(sync_folder)) if self.is_first else None

    def step(self, updates: list[list[MicroBatch]], step: int) -> tuple[Tally, int]:
        tally = self.trainer.step(updates, step)
        return tally, self.trainer.skipped_in_a_row

    def frozen(self, batches: list[MicroBatch], names: Sequence[str]) -> list[dict[str, np.ndarray]]:
        return self.trainer.frozen(batches, names)

    def publish(self, version: int) -> dict[str, Any] | None:
        """Gather the weights (all ranks) and put them where engines can take them (rank 0), which returns the notice."""
        if self.publisher is None:
            for _ in self.trainer.weights():
                pass
            return None
        return self.publisher.publish(version, self.trainer.weights(), self.trainer.sent_adapter())

    def save(self, folder: str) -> None:
        self.trainer.save(Path(folder))

    def save_state(self, folder: str) -> None:
        self.trainer.save_state(Path(folder))

    def load_state(self, folder: str) -> None:
        self.trainer.load_state(Path(folder))

    def close(self) -> None:
        if self.publisher is not None:
            self.publisher.close()


class TrainerGroup:
    """All ranks, driven together."""

    def __init__(self, actors: list[Any]) -> None:
        self.actors = actors
        self.sync_folder: Path | None = None

    @classmethod
    def create(cls, device: DeviceSpec, run: RunDirectory, options: list[dict[str, Any]], threads: int) -> TrainerGroup:
        """One actor per entry of `options` (Ray actor options), which know one another and have nothing to do yet."""
        environment = environment_for_trainer(device.device, threads)
        actors = []
        for rank, placed in enumerate(options):
            actor = ray.remote(TrainerActor).options(**placed, runtime_env={"env_vars": environment})
            actors.append(actor.remote(str(run.log_path(f"trainer_{rank}"))))
        address = ray.get(actors[0].address.remote())
        for rank, actor in enumerate(actors):
            actor.join.remote(rank, len(actors), address)  # an actor's calls run in order: `begin` waits for it
        return cls(actors)

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
        many updates in a row were skipped because something in them was not finite."""
        per_rank = [[update[rank] for update in updates] for rank in range(len(self.actors))]
        calls = [a.step.remote(batches, step) for a, batches in zip(self.actors, per_rank, strict=True)]
        parts = ray.get(calls)
        return Tally.merged(part for part, _ in parts), parts[0][1]

    def frozen(self, per_rank: list[list[MicroBatch]], names: Sequence[str]) -> list[list[dict[str, np.ndarray]]]:
        """Numbers of the action tokens of every rank's micro-batches under the current weights; see Trainer.frozen."""
        return ray.get([a.frozen.remote(batches, names) for a, batches in zip(self.actors, per_rank, strict=True)])

    def publish(self, version: int) -> dict[str, Any]:
        """Make the current weights available to engines; returns what an engine needs to take them."""
        return ray.get([actor.publish.remote(version) for actor in self.actors])[0]

    def save(self, folder: Path) -> None:
        ray.get([actor.save.remote(str(folder)) for actor in self.actors])

    def save_state(self, folder: Path) -> None:
        """Write what decides the next step, every rank its part; the folder is on storage that all ranks share."""
        ray.get([actor.save_state.remote(str(folder)) for actor in self.actors])

    def load_state(self, folder: Path) -> None:
        """Go on where `save_state` was called, with ranks that have not trained yet. Raises: ValueError."""
        ray.get([actor.load_state.remote(str(folder)) for actor in self.actors])

    def close(self) -> None:
        ray.get([actor.close.remote() for actor in self.actors])

    def abandon(self) -> None:
        """End the actors at once, and remove the weights that rank 0 may have left on disk."""
        for actor in self.actors:
            ray.kill(actor)
        if self.sync_folder is not None:
            shutil.rmtree(self.sync_folder, ignore_errors=True)
