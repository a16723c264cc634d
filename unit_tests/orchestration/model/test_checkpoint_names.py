"""Engines get every tensor of a checkpoint, under its name, also where transformers keeps it otherwise in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from configs.blocks.lora import Lora
from configs.blocks.rl import Model
from orchestration.cluster.devices import resolve
from orchestration.model.checkpoint_names import as_in_checkpoint, saved_buffers
from orchestration.model.critic import load_critic
from orchestration.model.lora import merged_tensors
from orchestration.model.policy_model import load_policy
from unit_tests.orchestration.model.test_policy_model import SIZES

EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **SIZES, **EXPERTS, n_routed_experts=4, first_k_dense_replace=1, n_group=1, topk_group=1
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    made = transformers.AutoModelForCausalLM.from_config(FAMILIES[request.param]())
    for name, buffer in made.named_buffers():
        if "correction_bias" in name:
            buffer.normal_()
    made.save_pretrained(folder)
    return Model(path=str(folder), dtype="float32", device="cpu")


def test_the_tensors_that_are_sent_are_the_checkpoints(model: Model) -> None:
    checkpoint = load_file(Path(model.path) / "model.safetensors")
    hf_model = load_policy(model, resolve("cpu")).hf_model
    own = [*hf_model.named_parameters(), *saved_buffers(hf_model)]
    parts = iter(own)
    next(as_in_checkpoint(hf_model, parts))
    assert len(list(parts)) == len(own) - 1, "a second copy of the model would be in memory"
    sent = dict(as_in_checkpoint(hf_model, own))
    assert sent.keys() == checkpoint.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in checkpoint.items())
    lora = Lora(rank=2, target_modules=["q_proj"])
    adapted = load_policy(model, resolve("cpu"), lora=lora).hf_model
    merged = dict(as_in_checkpoint(adapted, (*merged_tensors(adapted), *saved_buffers(adapted))))
    assert all(torch.equal(merged[name], tensor) for name, tensor in checkpoint.items())


def test_frequencies_and_the_bias_of_a_router_stay_float32_when_a_model_is_cast(model: Model) -> None:
    for whole in (load_policy(model, resolve("cpu")), load_critic(model, resolve("cpu"))):
        before = {name: buffer.clone() for name, buffer in whole.named_buffers()}
        for name, buffer in whole.to(torch.bfloat16).named_buffers():
            assert buffer.dtype == torch.float32, name
            assert torch.equal(buffer, before[name]), name
