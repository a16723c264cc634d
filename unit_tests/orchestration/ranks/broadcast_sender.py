"""A sender in a process of its own, for tests that kill or freeze it: offers a group, then sends a file of tensors slowly.

Arguments: the time-out in seconds, a file of (name, tensor) pairs, the seconds between two of them, the version.
"""

import json
import sys
import time
from collections.abc import Iterator

import torch

from orchestration.cluster.devices import resolve
from orchestration.weight_transfer.broadcaster import WeightBroadcaster
from rollouts.vllm.weight_file import TensorInfo

timeout_seconds, seconds_apart, version = float(sys.argv[1]), float(sys.argv[3]), int(sys.argv[4])
broadcaster = WeightBroadcaster(resolve("cpu"), bucket_mib=0.001)
offer = broadcaster.offer()
print(json.dumps(offer), flush=True)
broadcaster.join(offer, 2, timeout_seconds, 60.0)

tensors = torch.load(sys.argv[2])


def slowly() -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        yield name, tensor
        print(name, flush=True)
        time.sleep(seconds_apart)


print(json.dumps(broadcaster.send(version, slowly(), [TensorInfo.of(*pair) for pair in tensors])), flush=True)
