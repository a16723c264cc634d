"""For test_gpu_publisher.py: whether trainer rank 0 finds that it shares its GPU with the job's only engine, on a Ray that only
says it has GPUs."""

import json

import ray

from orchestration.cluster.devices import FLEX, DeviceSpec
from orchestration.cluster.gpu_bundles import placed
from orchestration.weight_transfer.gpu_publisher import is_beside_the_only_engine

ray.init(num_cpus=8, num_gpus=2, include_dashboard=False, log_to_driver=False)
asked = ray.remote(is_beside_the_only_engine)
found = {}
for name, ranks, engines, colocate in [
    ("1 and 1", 1, 1, True),
    ("2 and 2", 2, 2, True),
    ("1 and 2", 1, 2, True),
    ("apart", 1, 1, False),
]:
    with placed(DeviceSpec("cuda", "nccl", FLEX, 8, 2), ranks, engines, 1, colocate) as options:
        found[name] = ray.get(asked.options(**options[0]).remote())
ray.shutdown()
print(json.dumps(found))
