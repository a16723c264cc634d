from __future__ import annotations

import os

import pytest
import torch

from orchestration.devices import BUCKETS, FLEX, environment_for_trainer, resolve


def test_cpu() -> None:
    spec = resolve("cpu")
    assert (spec.device, spec.backend, spec.attention) == ("cpu", "gloo", BUCKETS)
    assert spec.cores == len(os.sched_getaffinity(0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_auto_without_a_gpu() -> None:
    assert resolve("auto") == resolve("cpu")
    with pytest.raises(ValueError, match="no CUDA device"):
        resolve("cuda")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_auto_with_a_gpu() -> None:
    assert (resolve("auto").device, resolve("auto").backend, resolve("auto").attention) == ("cuda", "nccl", FLEX)


def test_the_attention_function_can_be_chosen_but_not_invented() -> None:
    assert resolve("cpu", FLEX).attention == FLEX
    with pytest.raises(ValueError, match=BUCKETS):
        resolve("cpu", "sdpa")
    with pytest.raises(ValueError, match="auto, cpu, cuda"):
        resolve("tpu")


def test_trainer_environment() -> None:
    environment = environment_for_trainer("cpu", 2)
    assert environment["DS_ACCELERATOR"] == "cpu"
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
