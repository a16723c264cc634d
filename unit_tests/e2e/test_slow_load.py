"""Weights that come slowly, to a real engine that is watched."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from orchestration.cluster.devices import resolve
from orchestration.weight_transfer.broadcaster import WeightBroadcaster
from rollouts.vllm.weight_file import TensorInfo
from unit_tests.e2e.shared_stack import SharedStack
from unit_tests.waiting import PATIENCE_SECONDS, wait_for

pytestmark = pytest.mark.e2e

SECONDS, VERSION = 6.0, 50


def test_an_engine_that_weights_come_to_slowly_does_not_stand_still(stack: SharedStack) -> None:
    """Alone catches a load that is judged by how long all of it takes, not by what comes."""
    config = stack.small()
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=getattr(torch, config.model.dtype))
    tensors = [(name, parameter.detach()) for name, parameter in model.named_parameters()]

    actor = stack.actors.pool.actors[0]
    phase = f"load weights of version {VERSION}"

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        wait_for(lambda: ray.get(actor.heartbeat.remote()).phase == phase, "the load has begun")
        has_begun.set()
        for pair in tensors:
            time.sleep(SECONDS / len(tensors))
            yield pair

    sender, has_begun, beats = WeightBroadcaster(resolve("cpu"), bucket_mib=0.001), threading.Event(), []
    offer = sender.offer()
    told = {**offer, "size": 2, "timeout_seconds": 30.0, "join_seconds": 60.0}
    joining = actor.join_transfer.remote({**told, "first_rank": 1})
    sender.join(offer, 2, 30.0, 60.0)
    ray.get(joining)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, VERSION, slowly(), [TensorInfo.of(*pair) for pair in tensors])
        loading = actor.load_weights.remote(VERSION, {"version": VERSION})
        assert has_begun.wait(PATIENCE_SECONDS)
        while not ray.wait([loading], timeout=0.5)[0]:
            beats.append(ray.get(actor.heartbeat.remote()))
        sending.result()
    sender.close()
    assert ray.get(loading).pause_seconds > SECONDS / 2
    while beats and beats[-1].phase != phase:
        beats.pop()  # the load ended between the last two looks
    assert {heartbeat.phase for heartbeat in beats} == {phase}
    assert len(beats) > 2 and max(heartbeat.still_seconds for heartbeat in beats) < 0.7 * SECONDS
