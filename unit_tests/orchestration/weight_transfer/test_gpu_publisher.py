"""Weights that stay in the memory of a device which trainer and engine share. The CPU stands for the GPU, with torch's own
handles of shared memory between two real processes: the layout, the checks and the life of the memory are the same code."""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollouts.vllm.gpu_memory import DeviceUpdate, DeviceVersion
from unit_tests.orchestration.ranks.device_tensors import tensors

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


class Trainer:
    """The other process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "unit_tests.orchestration.ranks.device_sender"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip

    def publish(self, version: int, *sizes: int) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(version, *sizes, file=self.process.stdin, flush=True)
        notice: dict[str, Any] = pickle.loads(base64.b64decode(self.process.stdout.readline()))
        return notice


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    trainer = Trainer()
    yield trainer
    trainer.process.kill()
    trainer.process.communicate()


def taken(notice: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    version = DeviceVersion(DeviceUpdate(**notice), CPU)
    copied = [(name, tensor.clone()) for bucket in version.buckets() for name, tensor in bucket.tensors]
    version.check()
    return copied


def test_versions_come_bit_for_bit_through_memory_that_is_kept(trainer: Trainer) -> None:
    """In pieces of 4 KiB: several tensors in one, one that needs more, a version that outgrows a piece, and smaller ones."""
    sizes = [(600, 0, 500, 7), (600, 0, 500, 7), (600, 0, 5000, 7, 2000), (600, 2000, 7), (1,)]
    handles = []
    for version, of_this in enumerate(sizes):
        notice = trainer.publish(version, *of_this)
        for (name, ours), (told, theirs) in zip(tensors(version, list(of_this)), taken(notice), strict=True):
            assert name == told and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        assert notice["size_bytes"] == sum(piece["size_bytes"] for piece in notice["pieces"])
        handles.append([piece["handle"] for piece in notice["pieces"]])
    assert len(handles[0]) == 2 and handles[0] == handles[1]
    assert len(handles[2]) > 2 and handles[2][0] == handles[0][0] and handles[2][1] not in handles[0]
    assert handles[3] == handles[2][:2]
    assert handles[4] == handles[0][:1]


def test_a_version_that_is_written_over_while_it_is_copied_is_refused(trainer: Trainer) -> None:
    version = DeviceVersion(DeviceUpdate(**trainer.publish(1, 500, 500)), CPU)
    version.check()
    after = trainer.publish(2, 500, 500)
    with pytest.raises(ValueError, match="piece 0 on GPU cpu are not those sent"):
        version.check()
    assert len(taken(after)) == 2


def test_an_engine_on_another_gpu_refuses(trainer: Trainer) -> None:
    notice = {**trainer.publish(1, 10), "gpu": "GPU-1234"}
    with pytest.raises(ValueError, match="in the memory of GPU GPU-1234, and this engine is on cpu"):
        taken(notice)


def test_memory_of_a_trainer_that_ended_cannot_be_opened(trainer: Trainer) -> None:
    notice = trainer.publish(1, 10)
    assert len(taken(notice)) == 1
    trainer.process.kill()
    trainer.process.wait()

    def refusal() -> str | None:
        try:
            taken(notice)
        except ValueError as error:
            return str(error)
        return None

    deadline = time.monotonic() + 20  # torch's own process removes the memory when it sees the end of this one
    while (why := refusal()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "cannot be opened" in why


@pytest.mark.e2e
def test_only_where_the_one_engine_sees_it() -> None:
    """On a Ray that only says it has GPUs, in a process of its own, since the session's may be alive in this one."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "PYTHONPATH": str(ROOT)
    }
    command = [sys.executable, "-m", "unit_tests.orchestration.ranks.ranks_beside_engines"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.strip().splitlines()[-1]) == {
        "1 and 1": True,
        "2 and 2": False,
        "1 and 2": False,
        "apart": False,
    }
