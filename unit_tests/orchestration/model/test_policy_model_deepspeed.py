"""The packed forward pass inside DeepSpeed: two processes get the gradients of one, at every ZeRO stage."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[3]
TEMPERATURE = 0.7


def model_and_batches(ranks: int):
    import numpy as np
    import transformers

    from data_feeds.packing import pack
    from data_feeds.responses import Responses
    from orchestration.cluster.devices import BUCKETS
    from orchestration.model.policy_model import PolicyModel
    from records.rollout import Prompt, Trajectory

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = PolicyModel(transformers.AutoModelForCausalLM.from_config(config, attn_implementation=BUCKETS))
    rng = np.random.default_rng(0)
    trajectories = []
    for group, size in enumerate((3, 2, 4, 1, 2)):
        prompt_ids = rng.integers(3, 61, 6).astype(np.int32)
        for sample in range(size):
            length = int(rng.integers(1, 12))
            trajectories.append(
                Trajectory(
                    prompt=Prompt("p", []),
                    group_id=str(group),
                    sample=sample,
                    prompt_ids=prompt_ids,
                    token_ids=rng.integers(3, 61, length).astype(np.int32),
                    behavior_logprobs=np.zeros(length, np.float32),
                    versions=np.zeros(length, np.int32),
                    is_action=np.ones(length, bool),
                    turn=np.zeros(length, np.int32),
                )
            )
    groups = np.asarray([int(t.group_id) for t in trajectories])
    weights = rng.random(len(trajectories))
    return model, pack(Responses(trajectories), groups, weights, {}, 40, ranks, share_prompts=True)


def loss_of(model, batch) -> torch.Tensor:
    from orchestration.model.prepared_batch import to_device

    prepared = to_device(batch, "cpu")
    logprobs, entropy = model(prepared, TEMPERATURE)
    return ((entropy * 0.1 - logprobs) * prepared.loss_weights).sum()


def worker(out: str) -> None:
    """One rank: at every stage accumulate this rank's micro-batches; rank 0 writes the full gradients of each."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as the trainer: nothing is compiled
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    gradients = []
    for stage in range(4):
        model, per_rank = model_and_batches(ranks)
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.0),
            config={
                "train_batch_size": ranks,
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
                "zero_allow_untested_optimizer": True,
            },
        )
        for i, batch in enumerate(per_rank[rank]):
            engine.set_gradient_accumulation_boundary(i == len(per_rank[rank]) - 1)
            engine.backward(loss_of(engine, batch) * ranks, scale_wrt_gas=False)
        gradients.append({name: safe_get_full_grad(p) for name, p in engine.module.named_parameters()})
    if rank == 0:
        torch.save(gradients, out)


def test_gradients_are_those_of_one_plain_process(tmp_path: Path) -> None:
    ranks = 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    out = tmp_path / "gradients.pt"
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(out)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "DS_ACCELERATOR": "cpu",
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
        )
        for rank in range(ranks)
    ]
    logs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(logs)
    model, ((*batches,),) = model_and_batches(1)
    assert len(batches) > 1
    for batch in batches:
        loss_of(model, batch).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for stage, gradients in enumerate(torch.load(out)):
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, atol=1e-6, rtol=1e-4, msg=f"stage {stage}: {name}")


if __name__ == "__main__":
    worker(sys.argv[1])
