"""The trainer ranks as Ray actors, and the driver's one handle on all of them."""

from __future__ import annotations

import operator
import os
from pathlib import Path
from typing import Any

import ray

from algs.method import PolicyMethod
from configs.blocks.sync import SyncMethod
from data_feeds.packing import MicroBatch
from orchestration.cluster.cpu_cores import bind_to
from orchestration.cluster.devices import DeviceSpec, free_port
from orchestration.cluster.heartbeat import IDLE, Activity, Heartbeat
from orchestration.cluster.processes import lead_own_group
from orchestration.metrics.tally import Tally
from orchestration.run.logs import redirect_output_to
from orchestration.trainer.settings import TrainerSettings
from orchestration.weight_transfer.sender import WeightSender
from rollouts.vllm.weight_file import TensorInfo


class TrainerActor:
    """One rank in a process of its own, constructed empty: rank 0's address must be known before any rank connects."""

    def __init__(self, log_file: str, cores: tuple[int, ...] = ()) -> None:
        """Prepare the process. cores: those to which it is bound; see CorePlan."""
        bind_to(cores)
        lead_own_group()
        redirect_output_to(log_file)
        self.activity = Activity()
        self.sender: WeightSender | None = None  # of rank 0
        self.tensors: list[TensorInfo] | None = None  # what a broadcast of the weights consists of

    @ray.method(concurrency_group="heartbeat")  # a thread of its own: it answers while the others work
    def heartbeat(self) -> Heartbeat:
        return self.activity.heartbeat()

    def address(self) -> tuple[str, int]:
        """Return this node's address and a free port on it, for the ranks' rendezvous."""
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
        """Connect to the other ranks, load the model, wrap it in DeepSpeed. Forget an earlier job; stay connected."""
        from orchestration.trainer.trainer import Trainer  # DeepSpeed is imported in actors only

        self.close()
        with self.activity.during("load the model"):
            self.trainer = Trainer(settings, method, device, activity=self.activity)
        self.tensors = None
        self.sender = WeightSender(sync_method, Path(sync_folder), device) if self.is_first else None

    def step(self, updates: list[list[MicroBatch]], step: int) -> tuple[Tally, int]:
        """Run a step's updates; return its metrics, and how many updates in a row were skipped up to its end."""
        tally = self.call(f"step {step}", "step", updates, step)
        return tally, self.trainer.counters.skipped_in_a_row

    def call(self, doing: str, method: str, *arguments: Any) -> Any:
        """Call a method of the trainer by its name, such as "weights.save"; the heartbeat says `doing` meanwhile."""
        with self.activity.during(doing):
            return operator.attrgetter(method)(self.trainer)(*arguments)

    def publish(self, version: int, method: SyncMethod) -> dict[str, Any] | None:
        """Gather the weights (all ranks) and bring them to where engines load them (rank 0, which returns the notice).

        Raise TransferFailed or OSError when they could not be brought there.
        """
        self.activity.enter(f"publish version {version}")
        if method == "nccl" and self.tensors is None:  # receivers are told before the first tensor is gathered
            self.tensors = [TensorInfo.of(name, t) for name, t in self.activity.moved_by(self.trainer.weights.sent())]
        weights = self.activity.moved_by(self.trainer.weights.sent())
        try:
            if self.sender is None:
                return None
            adapter = self.trainer.weights.adapter_notice()
            return self.sender.publish(version, weights, adapter, method, self.tensors)
        finally:
            for _ in weights:  # gathering takes all ranks, also when the sender broke off
                pass
            self.activity.enter(IDLE)

    def offer_transfer(self, bucket_mib: float) -> dict[str, Any]:
        """Listen, as rank 0, for a new broadcast group; see WeightBroadcaster.offer."""
        assert self.sender is not None
        return self.sender.broadcaster(bucket_mib).offer()

    def join_transfer(self, *told: Any) -> None:
        """Join, as rank 0, the group that it offered; see WeightBroadcaster.join. May raise TransferFailed."""
        assert self.sender is not None and self.sender.broadcast is not None
        self.sender.broadcast.join(*told)

    def release_memory(self) -> None:
        """Give device memory that torch keeps for later back to an engine on the same GPU. Not yet run on a GPU."""
        import torch

        torch.cuda.empty_cache()  # nothing to do where there is no GPU

    def close(self) -> None:
        if self.sender is not None:
            self.sender.close()
