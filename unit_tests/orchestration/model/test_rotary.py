"""With longrope a sequence's log-probabilities are those of the job's longest sequence, whatever is packed beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from configs.blocks.rl import Model
from orchestration.cluster.devices import resolve
from orchestration.model.critic import load_critic
from orchestration.model.policy_model import load_policy
from orchestration.model.prepared_batch import to_device
from unit_tests.orchestration.model.test_policy_model import SIZES, VOCAB, packed, trajectory

ORIGINAL = 16  # positions; with more, the long factors are meant
LENGTHS = (3, 9, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("longrope")
    torch.manual_seed(0)
    config = transformers.Phi3Config(
        **SIZES,
        max_position_embeddings=64,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": ORIGINAL,
            "short_factor": [1.0] * 8,
            "long_factor": list(np.linspace(2.0, 8.0, 8)),
        },
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("longest", [ORIGINAL, ORIGINAL + 1])
def test_longrope_is_that_of_the_jobs_longest_sequence(folder: Path, longest: int) -> None:
    """transformers itself takes the long factors when it sees a long sequence: the tokens that follow make it one."""
    rng = np.random.default_rng(0)
    made = [trajectory(rng, g, 0, rng.integers(3, VOCAB, 4).astype(np.int32), n) for g, n in enumerate(LENGTHS)]
    long = trajectory(rng, len(made), 0, rng.integers(3, VOCAB, 4).astype(np.int32), longest - 4)
    model = Model(path=str(folder), dtype="float32", device="cpu")
    policy = load_policy(model, resolve("cpu"), longest=longest)
    critic = load_critic(model, resolve("cpu"), longest)
    critic.value_head.weight.data.normal_()
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    values = []
    for together in (made, [*made, long]):
        (batch,) = packed(together, share_prompts=False)
        with torch.no_grad():
            logprobs, value = policy(to_device(batch, "cpu"))[0], critic(to_device(batch, "cpu"))
        for s, index in enumerate(batch.trajectory_index.tolist()):
            t = together[index]
            ids = np.concatenate([t.prompt_ids, t.token_ids, rng.integers(3, VOCAB, longest)])[:longest]
            with torch.no_grad():
                logits = plain(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0]
            chosen = torch.log_softmax(logits[3 : 3 + len(t.token_ids)], -1).gather(
                1, torch.from_numpy(t.token_ids.astype(np.int64))[:, None]
            )[:, 0]
            expected = chosen[torch.from_numpy(t.is_action)]
            torch.testing.assert_close(logprobs[batch.sequence == s], expected, rtol=1e-5, atol=1e-5)
            if index == 1:
                values.append(value[batch.sequence == s])
    torch.testing.assert_close(values[0], values[1], rtol=1e-5, atol=1e-5)


def test_dynamic_rotary_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    transformers.LlamaConfig(**SIZES, rope_parameters=rope).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has rope_type dynamic: log-probabilities then depend on the longest"):
        load_policy(Model(path=str(tmp_path), device="cpu"), resolve("cpu"))
