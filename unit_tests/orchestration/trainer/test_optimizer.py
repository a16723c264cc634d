"""In bfloat16 the float32 weights under the optimizer are the checkpoint's own, and follow torch's AdamW from step one."""

import pickle

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from unit_tests.orchestration.ranks import masters_rank
from unit_tests.orchestration.trainer.test_trainer import GROUPS, packed_batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory, rank_groups):
    folder = tmp_path_factory.mktemp("masters")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=31, intermediate_size=48, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():  # also norms, of an odd number of elements, are no bfloat16 numbers then
        parameter.data.mul_(1 + 0.1 * torch.rand_like(parameter))
    model.save_pretrained(folder / "model")
    batches = {ranks: packed_batch(list(range(sum(GROUPS))), 60, ranks, True) for ranks in (1, 2)}
    (folder / "micro_batches.pkl").write_bytes(pickle.dumps(batches))
    for ranks in (1, 2):
        rank_groups[ranks].run("unit_tests.orchestration.ranks.masters_rank", folder)
    return folder


@pytest.mark.parametrize("stage", masters_rank.STAGES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_in_bfloat16_the_unrounded_weights_follow_torchs_adamw(folder, stage, ranks):
    start = load_file(folder / "model" / "model.safetensors")
    for rank in range(ranks):
        before, gradients, after, sent = torch.load(folder / f"{stage}_{ranks}_{rank}.pt")
        assert before.keys() == start.keys()
        weights = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in start.items()}
        decayed = [p for p in weights.values() if p.ndim >= 2]
        plain = torch.optim.AdamW(
            [{"params": decayed}, {"params": [p for p in weights.values() if p.ndim < 2], "weight_decay": 0.0}],
            lr=masters_rank.TRAIN["learning_rate"], weight_decay=masters_rank.TRAIN["weight_decay"],
        )  # fmt: skip
        for update in gradients:
            for name, parameter in weights.items():
                parameter.grad = update[name]
            plain.step()
        for name, parameter in weights.items():
            assert torch.equal(before[name], start[name]), f"{name} was rounded"
            torch.testing.assert_close(after[name], parameter.detach(), rtol=1e-6, atol=1e-6, msg=name)
            assert torch.equal(sent[name], after[name].bfloat16()), name
