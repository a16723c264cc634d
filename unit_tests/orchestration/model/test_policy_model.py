"""Packed forward passes against separate ones, for the families that differ in attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from configs.blocks.lora import Lora
from configs.blocks.rl import Model
from data_feeds.packing import MicroBatch, pack
from data_feeds.responses import Responses
from orchestration.cluster.devices import BUCKETS, FLEX, resolve
from orchestration.model.critic import load_critic
from orchestration.model.policy_model import PolicyModel, load_policy
from orchestration.model.prepared_batch import to_device
from records.rollout import Prompt, Trajectory

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 5  # shorter than the sequences below
FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "llama_tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=16,
        final_logit_softcapping=3.0,
    ),
    "mistral_sliding": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
}


def build(family: str, attention: str = BUCKETS) -> PolicyModel:
    torch.manual_seed(0)
    config = FAMILIES[family]()
    config._attn_implementation = attention
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for name, parameter in model.named_parameters():  # initial norms and biases of 1 and 0 would hide mistakes
        parameter.data.add_(0.05 * torch.randn_like(parameter)) if parameter.dim() == 1 else parameter.data.mul_(4)
        del name
    return PolicyModel(model)


def trajectory(rng: np.random.Generator, group: int, sample: int, prompt_ids: np.ndarray, length: int) -> Trajectory:
    is_action = rng.random(length) < 0.8
    is_action[-1 if length > 1 else 0] = True
    return Trajectory(
        prompt=Prompt(f"p{group}", []),
        group_id=f"g{group}",
        sample=sample,
        prompt_ids=prompt_ids,
        token_ids=rng.integers(3, VOCAB, length).astype(np.int32),
        behavior_logprobs=rng.normal(size=length).astype(np.float32),
        versions=np.full(length, 4, dtype=np.int32),
        is_action=is_action,
        turn=np.zeros(length, dtype=np.int32),
    )


@pytest.fixture(scope="module")
def trajectories() -> list[Trajectory]:
    """Five groups of ragged responses; group 0 has repeated and nested responses, group 4 a single token."""
    rng = np.random.default_rng(0)
    made = []
    for group, (prompt, lengths) in enumerate([(7, [4, 9, 9, 1]), (3, [12]), (19, [8, 2, 30]), (1, [5, 6]), (4, [1])]):
        prompt_ids = rng.integers(3, VOCAB, prompt).astype(np.int32)
        made += [trajectory(rng, group, sample, prompt_ids, length) for sample, length in enumerate(lengths)]
    made[2].token_ids[:] = made[1].token_ids
    made[0].token_ids[:] = made[1].token_ids[:4]
    return made


def packed(trajectories: list[Trajectory], share_prompts: bool, max_tokens: int = 10_000) -> list[MicroBatch]:
    groups = np.asarray([int(t.group_id[1:]) for t in trajectories])
    (batches,) = pack(Responses(trajectories), groups, np.ones(len(trajectories)), {}, max_tokens, 1, share_prompts)
    return batches


def coefficients(index: int, count: int) -> torch.Tensor:
    """Fixed random factors of a trajectory's log-probabilities and entropies, so that gradients can be compared."""
    return torch.randn(2, count, generator=torch.Generator().manual_seed(index))


def separately(model: PolicyModel, trajectories: list[Trajectory], temperature: float) -> dict[int, torch.Tensor]:
    """[2, N_i] log-probabilities and entropies of every trajectory by plain, unpacked, eager passes; gradients added up."""
    hf = model.hf_model
    hf.set_attn_implementation("eager")
    results = {}
    for i, t in enumerate(trajectories):
        ids = torch.from_numpy(np.concatenate([t.prompt_ids, t.token_ids]).astype(np.int64))[None]
        logits = hf(input_ids=ids, use_cache=False).logits[0, len(t.prompt_ids) - 1 : -1].double() / temperature
        logp = torch.log_softmax(logits, dim=-1)
        entropy = -(logp.exp() * logp).sum(-1)
        chosen = logp.gather(1, torch.from_numpy(t.token_ids.astype(np.int64))[:, None])[:, 0]
        both = torch.stack([chosen, entropy])[:, torch.from_numpy(t.is_action)]
        (both * coefficients(i, both.shape[1])).sum().backward()
        results[i] = both.detach()
    return results


def by_packing(model: PolicyModel, batches: list[MicroBatch], temperature: float) -> dict[int, torch.Tensor]:
    results = {}
    for batch in batches:
        prepared = to_device(batch, "cpu")
        both = torch.stack(model(prepared, temperature))
        loss = both.new_zeros(())
        for s, index in enumerate(batch.trajectory_index.tolist()):
            own = both[:, prepared.sequence == s]
            results[index] = own.detach()
            loss = loss + (own * coefficients(index, own.shape[1])).sum()
        loss.backward()
    return results


def gradients(model: PolicyModel) -> dict[str, torch.Tensor]:
    collected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return collected


@pytest.mark.parametrize("short_keys", [192, 6])
@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_separate(
    family: str, share_prompts: bool, short_keys: int, trajectories: list[Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few keys counting as short, rows go through the fused kernel and repeat their shared prompt."""
    monkeypatch.setattr("orchestration.model.packed_layout.SHORT_KEYS", short_keys)
    monkeypatch.setattr("orchestration.model.packed_attention.SHORT_KEYS", short_keys)
    model = build(family)
    for max_tokens in (10_000, 40):
        model.hf_model.set_attn_implementation(BUCKETS)
        got = by_packing(model, packed(trajectories, share_prompts, max_tokens), temperature=0.7)
        got_gradients = gradients(model)
        expected = separately(model, trajectories, temperature=0.7)
        expected_gradients = gradients(model)
        assert got.keys() == expected.keys() == set(range(len(trajectories)))
        for i in expected:
            torch.testing.assert_close(got[i].double(), expected[i], atol=1e-5, rtol=1e-5)
        assert got_gradients.keys() == expected_gradients.keys()
        scale = max(float(g.abs().max()) for g in expected_gradients.values())
        for name, gradient in expected_gradients.items():
            assert float((got_gradients[name] - gradient).abs().max()) <= 1e-4 * scale, name


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("family", ["llama_tied", "gemma3"])
def test_flex_attention_sees_the_same(family: str, share_prompts: bool) -> None:
    """Forward only: torch has no backward pass for flex_attention on CPU. The batch spans several blocks of 128."""
    rng = np.random.default_rng(3)
    made = []
    for group, prompt in enumerate((40, 90, 7, 150)):
        prompt_ids = rng.integers(3, VOCAB, prompt).astype(np.int32)
        made += [trajectory(rng, group, s, prompt_ids, int(rng.integers(1, 60))) for s in range(4)]
    (batch,) = packed(made, share_prompts)
    assert batch.tokens > 4 * 128
    with torch.no_grad():
        buckets = torch.stack(build(family, BUCKETS)(to_device(batch, "cpu"), 0.7))
        flex = torch.stack(build(family, FLEX)(to_device(batch, "cpu"), 0.7))
    torch.testing.assert_close(flex, buckets, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("share_prompts", [False, True])
def test_nothing_leaks_between_sequences(share_prompts: bool, trajectories: list[Trajectory]) -> None:
    model = build("llama_tied")
    rng = np.random.default_rng(1)

    def logprobs(changed: int | None) -> dict[int, torch.Tensor]:
        made = list(trajectories)
        if changed is not None:
            t = made[changed]
            made[changed] = trajectory(rng, int(t.group_id[1:]), t.sample, t.prompt_ids, len(t.token_ids))
        (batch,) = packed(made, share_prompts)
        with torch.no_grad():
            values = torch.stack(model(to_device(batch, "cpu")))
        return {int(i): values[:, batch.sequence == s] for s, i in enumerate(batch.trajectory_index)}

    before = logprobs(None)
    after = logprobs(3 + 1 + 1)  # a response in the middle of group 2
    assert before[5].shape != after[5].shape or not torch.equal(before[5], after[5])
    for i in before.keys() - {5}:
        torch.testing.assert_close(before[i], after[i], atol=2e-6, rtol=0)


def test_casting_keeps_rotary_frequencies_in_float32() -> None:
    model = build("llama_tied").to(torch.bfloat16)
    (frequencies,) = [b for name, b in model.named_buffers() if name.endswith("rotary_emb.inv_freq")]
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, dict(build("llama_tied").named_buffers())["hf_model.model.rotary_emb.inv_freq"])
    assert model.hf_model.lm_head.weight.dtype == torch.bfloat16


def test_gradient_checkpointing_changes_nothing(trajectories: list[Trajectory]) -> None:
    model = build("qwen3")
    batches = packed(trajectories, share_prompts=True)
    plain = by_packing(model, batches, 1.0), gradients(model)
    model.hf_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    recomputed = by_packing(model, batches, 1.0), gradients(model)
    for i, expected in plain[0].items():
        assert torch.equal(recomputed[0][i], expected)
    for name, expected in plain[1].items():
        torch.testing.assert_close(recomputed[1][name], expected, atol=1e-6, rtol=1e-5)


def refused() -> Iterator[tuple[str, transformers.PretrainedConfig, str]]:
    sizes = {**SIZES, "num_hidden_layers": 2}
    yield "soft-capped scores", transformers.Gemma2Config(**sizes, sliding_window=WINDOW), "soft cap"
    chunked = transformers.LlamaConfig(**sizes)
    chunked.layer_types = ["chunked_attention", "full_attention"]
    yield "chunked layers", chunked, "chunked_attention"
    yield "recurrent layers", transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2), "Mamba"
    yield "own attention", transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=2), "interface"


@pytest.mark.parametrize(("config", "message"), [(c, m) for _, c, m in refused()], ids=[n for n, _, _ in refused()])
def test_unsupported_families_are_refused(
    config: transformers.PretrainedConfig, message: str, trajectories: list[Trajectory]
) -> None:
    (batch,) = packed(trajectories, share_prompts=False)
    with pytest.raises(ValueError, match=message):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=BUCKETS)
        PolicyModel(model)(to_device(batch, "cpu"))


def test_loading(tmp_path, trajectories: list[Trajectory]) -> None:
    original = build("qwen2")
    original.hf_model.save_pretrained(tmp_path / "good")
    loaded = load_policy(Model(path=str(tmp_path / "good"), device="cpu"), resolve("cpu"))
    prepared = to_device(packed(trajectories, True)[0], "cpu")
    with torch.no_grad():
        assert torch.equal(loaded(prepared)[0], original(prepared)[0])
    with pytest.raises(ValueError, match="nowhere"):
        load_policy(Model(path=str(tmp_path / "nowhere")), resolve("cpu"))
    transformers.ViTConfig().save_pretrained(tmp_path / "vision")
    with pytest.raises(ValueError, match="vit, which is not a causal language model"):
        load_policy(Model(path=str(tmp_path / "vision")), resolve("cpu"))


NOISY: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "gpt2": lambda: transformers.GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=64),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCAB, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4,
        word_embed_proj_dim=64, max_position_embeddings=64, layerdrop=0.5,
    ),
    "seed_oss": lambda: transformers.SeedOssConfig(**SIZES),
    "llama": lambda: transformers.LlamaConfig(**SIZES, attention_dropout=0.2),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, router_jitter_noise=0.2),
}  # fmt: skip


@pytest.mark.parametrize("family", NOISY)
def test_a_training_pass_equals_a_pass_of_evaluation(
    family: str, tmp_path: Path, trajectories: list[Trajectory]
) -> None:
    """Old log-probabilities, the reference and the engine have no dropout, so training must have none either."""
    transformers.AutoModelForCausalLM.from_config(NOISY[family]()).save_pretrained(tmp_path)
    prepared = to_device(packed(trajectories, True)[0], "cpu")
    model = Model(path=str(tmp_path), dtype="float32", device="cpu")
    critic = load_critic(model, resolve("cpu"))
    critic.value_head.weight.data.normal_()
    lora = None if family == "gpt2" else Lora(rank=2, target_modules=["q_proj"])  # gpt2 has no linear layers
    for loaded in (load_policy(model, resolve("cpu")), load_policy(model, resolve("cpu"), lora=lora), critic):
        with torch.no_grad():
            passes = [loaded.train(mode)(prepared) for mode in (False, True, True)]
        torch.testing.assert_close(passes[1:], [passes[0]] * 2, rtol=0, atol=0)
