"""Where Ray puts actors on a machine that says it has three GPUs: prints as JSON, case by case, the GPUs of each, and whether
trainer rank 0 finds that it shares its GPU with the job's only engine."""

from __future__ import annotations

import json
import logging
from typing import Any

import ray

from orchestration.cluster.devices import FLEX, DeviceSpec
from orchestration.cluster.gpu_bundles import reserve_devices
from orchestration.weight_transfer.gpu_publisher import is_beside_the_only_engine

GPUS = 3
DEVICE = DeviceSpec("cuda", "nccl", FLEX, 4, GPUS)
CASES: list[tuple[int, int, int, bool | None]] = [  # ranks, engines, devices of an engine, colocate
    (2, 2, 1, None),
    (1, 1, 2, None),
    (1, 1, 1, True),
    (1, 2, 1, True),
    (1, 1, 1, False),
]


@ray.remote
class Somewhere:
    def gpus(self) -> list[int]:
        return [int(gpu) for gpu in ray.get_gpu_ids()]


def seen(options: list[dict[str, Any]]) -> list[list[int]]:
    actors = [Somewhere.options(**o).remote() for o in options]  # type: ignore[attr-defined]
    found: list[list[int]] = ray.get([actor.gpus.remote() for actor in actors])
    for actor in actors:
        ray.kill(actor)
    return found


if __name__ == "__main__":
    ray.init(address="local", num_cpus=4, num_gpus=GPUS, include_dashboard=False, logging_level=logging.ERROR)
    is_beside = ray.remote(is_beside_the_only_engine)
    cases = []
    for case in CASES:
        with reserve_devices(DEVICE, *case) as options:
            cases.append([seen(options), ray.get(is_beside.options(**options[0]).remote())])
    print(json.dumps(cases))
