"""A method that this machine does not have is a mistake at the start of a job, and a failed transfer when one falls
back to it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from orchestration.cluster.devices import resolve
from orchestration.weight_transfer.sender import WeightSender
from rollouts.vllm.weight_broadcast import TransferFailed

WEIGHTS = [("a", torch.ones(3))]


def test_without_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ValueError, match="needs Linux"):
        WeightSender("direct", tmp_path, resolve("cpu"))
    sender = WeightSender("nccl", tmp_path, resolve("cpu"))
    with pytest.raises(TransferFailed, match=r"sync\.method: direct needs Linux"):
        sender.publish(1, WEIGHTS, None, "direct")
    assert sender.publish(1, WEIGHTS, None, "disk")["version"] == 1
    sender.close()
