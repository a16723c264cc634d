"""A real vLLM engine takes the weights of a mixture of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from orchestration.weight_transfer.file_publisher import WeightPublisher
from rollouts.vllm.sampling import Sampling
from unit_tests.e2e.engine_pair import VOCABULARY, Pair

pytestmark = pytest.mark.e2e


def test_an_engine_holds_the_experts_that_it_was_sent(tmp_path: Path) -> None:
    """Alone catches experts under names that vLLM does not know, and raw experts in vLLM's packed and padded storage."""

    def mixtral(seed: int) -> Any:
        torch.manual_seed(seed)
        config = transformers.MixtralConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.15, num_local_experts=4,
            bos_token_id=0, eos_token_id=1, pad_token_id=2,
        )  # fmt: skip
        transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "made")  # loading prepares the conversion
        return transformers.MixtralForCausalLM.from_pretrained(tmp_path / "made", experts_implementation="eager").eval()

    pair, publisher = Pair(tmp_path, build=mixtral), WeightPublisher("direct", tmp_path / "weights")
    try:
        sampling = Sampling(max_new_tokens=24)
        assert pair.gap(pair.generate(sampling), 1.0) < 1e-4
        for seed in (1, 2):
            pair.sync(publisher, seed)
            assert pair.gap(pair.generate(sampling), 1.0) < 1e-4
    finally:
        publisher.close()
        pair.close()
