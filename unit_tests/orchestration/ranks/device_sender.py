"""A trainer in a process of its own that publishes from the memory of a device; the CPU stands for a GPU.

Reads lines from its input: a version, and sizes of tensors. Writes the notice of each as a line of base64.
"""

import base64
import pickle
import sys

import torch

from orchestration.weight_transfer.gpu_publisher import DevicePublisher
from unit_tests.orchestration.ranks.device_tensors import tensors

torch.multiprocessing.set_sharing_strategy("file_system")  # the one for processes that are not each other's children
publisher = DevicePublisher(torch.device("cpu"), piece_bytes=4096)
for line in sys.stdin:
    version, *sizes = map(int, line.split())
    notice = publisher.publish(version, tensors(version, sizes))
    for piece in publisher.pieces:  # on a CPU torch removes memory that was opened as often as it was shared
        piece.data.untyped_storage()._shared_incref()
    print(base64.b64encode(pickle.dumps(notice)).decode(), flush=True)
