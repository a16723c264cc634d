"""Reserve GPUs for trainer ranks and engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orchestration.cluster.devices import DeviceSpec, shares_gpus

PLACEMENT_SECONDS = 300  # a cluster may have to start nodes first
HALF = 0.5  # Ray's share of one GPU for a rank or an engine, when the two share it


@contextmanager
def reserve_devices(
    device: DeviceSpec, ranks: int, engines: int, devices_per_engine: int, colocate: bool | None = None
) -> Iterator[list[dict[str, Any]]]:
    """Yield the Ray options of each trainer rank, then of each engine; the devices are reserved inside the block.

    On GPUs every rank and every engine gets a bundle of its own, and an engine's devices are on one node. Where they
    share GPUs (see `shares_gpus`), rank i and engine i have half of bundle i's one GPU each. On CPUs nothing is
    reserved: orchestration/cluster/cpu_cores.py shares out the cores.

    Raises:
        ValueError: the cluster has too few GPUs.
        RuntimeError: the GPUs were not free within PLACEMENT_SECONDS.
    """
    if device.device != "cuda":
        yield [{"num_cpus": 0} for _ in range(ranks + engines)]
        return
    shared = shares_gpus(ranks, engines, devices_per_engine, int(ray.cluster_resources().get("GPU", 0)), colocate)
    sizes = [1] * max(ranks, engines) if shared else [1] * ranks + [devices_per_engine] * engines
    bundles = [*range(ranks), *(range(engines) if shared else range(ranks, ranks + engines))]
    group: PlacementGroup = placement_group([{"GPU": size, "CPU": 1} for size in sizes], strategy="PACK")
    try:
        if not group.wait(PLACEMENT_SECONDS):
            raise RuntimeError(
                f"the cluster did not free {len(sizes)} bundles of {sizes} GPUs within {PLACEMENT_SECONDS} s; "
                "wait until other jobs have ended, or lower train.ranks or rollout.engines"
            )
        yield [
            {
                "num_cpus": HALF if shared else 1,
                "num_gpus": HALF if shared else sizes[bundle],
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            }
            for bundle in bundles
        ]
    finally:
        remove_placement_group(group)


def shares_its_gpu(options: dict[str, Any]) -> bool:
    """Return whether an engine with these Ray options has a trainer rank beside it on its GPU."""
    return options.get("num_gpus") == HALF
