"""A sender in a process of its own, for tests that kill or freeze it: offers a group, then sends versions 1, 2, ... slowly."""

import json
import sys
import time

import torch

from orchestration.broadcast import WeightBroadcaster
from orchestration.devices import resolve

timeout_seconds, tensors, seconds_apart = (float(word) for word in sys.argv[1:])
broadcaster = WeightBroadcaster(resolve("cpu"), bucket_mib=0.001)
offer = broadcaster.offer()
print(json.dumps(offer), flush=True)
broadcaster.join(offer, 2, timeout_seconds, 60.0)


def slowly():
    for i in range(int(tensors)):
        yield f"tensor.{i}", torch.full((300,), float(i))
        print("sent", i, flush=True)
        time.sleep(seconds_apart)


print(json.dumps(broadcaster.send(1, slowly())), flush=True)
