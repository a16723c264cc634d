"""Every forward pass of an update is a movement: nothing that goes on is taken for standing still."""

import json
import pickle

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from unit_tests.orchestration.trainer.test_trainer import GROUPS, packed_batch


def test_each_micro_batch_is_told_also_where_a_method_first_sums_over_all_of_them(tmp_path, rank_groups):
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=32,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    packed = packed_batch(list(range(sum(GROUPS))), 40, 1, False)
    count = len(packed[0])
    assert count > 1
    (tmp_path / "micro_batches.pkl").write_bytes(pickle.dumps(packed))
    rank_groups[1].run("unit_tests.orchestration.ranks.heartbeat_rank", tmp_path)
    numbered = [f"micro-batch {i + 1} of {count}" for i in range(count)]
    assert json.loads((tmp_path / "said_0.json").read_text()) == [
        *(f"sums over the update, {one}" for one in numbered),
        *(f"forward and backward, {one}" for one in numbered),
        "optimizer step",
    ]
