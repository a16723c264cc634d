"""Adapters in the trainer against plain PEFT and float64 autograd; on disk and merged against PEFT and transformers."""

import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from configs.blocks.lora import Lora
from configs.blocks.rl import Model
from orchestration.cluster.devices import resolve
from orchestration.model.adapter_files import read_adapter, save_adapter
from orchestration.model.lora import (
    adapted,
    adapter_size,
    adapter_tensors,
    adapters_off,
    add_adapters,
    load_adapter,
    merged_tensors,
)
from orchestration.model.policy_model import load_policy
from unit_tests.orchestration.model.test_checkpoint_names import FAMILIES as MIXTURES
from unit_tests.orchestration.model.test_policy_model import FAMILIES, NOISY
from unit_tests.orchestration.ranks import lora_rank, trainer_rank
from unit_tests.orchestration.trainer.test_trainer import GROUPS, TEMPERATURE, batch_of, make_trajectories, packed_batch
from unit_tests.tiny_model import write_tiny_model

LORA = Lora(**lora_rank.LORA)
EVERYONE = list(range(sum(GROUPS)))


def random_adapter(hf_model, seed: int, size: float = 0.3) -> dict[str, torch.Tensor]:
    """Both factors away from zero: at B = 0, where adapters begin, A has no gradient."""
    generator = torch.Generator().manual_seed(seed)
    return {name: size * torch.randn(t.shape, generator=generator) for name, t in adapter_tensors(hf_model)}


def prepare(folder: Path) -> None:
    """A model, an adapter to start from, and micro-batches for every case."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    write_tiny_model(folder / "model")  # for its tokenizer
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    hf_model = LlamaForCausalLM.from_pretrained(folder / "model")
    add_adapters(hf_model, LORA)
    save_adapter(folder / "adapter", random_adapter(hf_model, seed=1), LORA, str(folder / "model"))
    packed = {}
    for ranks in (1, 2):
        for case, (_, _, budget, _, share, _) in lora_rank.CASES.items():
            packed[case, ranks] = packed_batch(EVERYONE, budget, ranks, share)
    (folder / "micro_batches.pkl").write_bytes(pickle.dumps(packed))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, rank_groups):
    """What one process and two processes made of every case."""
    folder = tmp_path_factory.mktemp("lora")
    prepare(folder)
    for ranks in (1, 2):
        rank_groups[ranks].run("unit_tests.orchestration.ranks.lora_rank", folder)
    return folder


def kept(folder: Path, case: str, ranks: int, rank: int = 0) -> dict:
    return torch.load(folder / f"{case}_{ranks}_{rank}.pt", weights_only=False)


def plain_peft(folder: Path, adapter: Path) -> PeftModel:
    """Base and adapter by transformers and PEFT alone, in float64."""
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64, attn_implementation="eager")
    return PeftModel.from_pretrained(base, adapter, is_trainable=True).double()


def logprobs_of(network, t) -> torch.Tensor:
    """Of a trajectory's own tokens, unpacked. [T]"""
    ids = torch.tensor(np.concatenate([t.prompt_ids, t.token_ids])[None].astype(np.int64))
    logits = network(input_ids=ids, use_cache=False).logits[0, len(t.prompt_ids) - 1 : -1] / TEMPERATURE
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(t.token_ids[:, None].astype(np.int64)))[:, 0]


def updated(folder: Path, kl_coef: float) -> dict[str, torch.Tensor]:
    """The adapter after the step, straight from the formulas. With one update per step pi_old is pi: the ratio is 1."""
    model = plain_peft(folder, folder / "adapter")
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64, attn_implementation="eager")
    loss = torch.zeros((), dtype=torch.float64)
    chosen, _, advantages, weights = batch_of(EVERYONE, make_trajectories())
    for t, advantage, weight in zip(chosen, advantages, weights, strict=True):
        new = logprobs_of(model, t)
        gap = logprobs_of(base, t).detach() - new
        loss = loss - weight * (torch.exp(new - new.detach()) * advantage - kl_coef * (torch.exp(gap) - gap - 1)).sum()
    loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in trained.values()))
    scale = min(1.0, trainer_rank.MAX_GRAD_NORM / (norm + 1e-6))
    with torch.no_grad():
        for p in trained.values():
            g = p.grad * scale
            p -= trainer_rank.LEARNING_RATE * g / (g.abs() + trainer_rank.EPS)
    return {name.replace(".default", ""): p.detach() for name, p in trained.items()}


EXACT = [case for case, block in lora_rank.CASES.items() if block[1] == "float32"]


@pytest.mark.parametrize("case", EXACT)
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_update_equals_plain_peft_in_float64(folder, case, ranks):
    start = load_file(folder / "adapter" / "adapter_model.safetensors")
    expected = updated(folder, kl_coef=lora_rank.CASES[case][3])
    for rank in range(ranks):
        found = kept(folder, case, ranks, rank)["adapter"]
        assert found.keys() == expected.keys() == start.keys()
        for name, before in start.items():
            moved = expected[name] - before
            assert moved.abs().max() > 1e-5, f"{name} does not move: the test shows nothing"
            torch.testing.assert_close(
                found[name].double() - before, moved, rtol=1e-4, atol=float(moved.abs().max()) * 1e-4, msg=name
            )


@pytest.mark.parametrize("case", list(lora_rank.CASES))
@pytest.mark.parametrize("ranks", [1, 2])
def test_only_adapters_are_trained_and_there_is_no_second_model(folder, case, ranks):
    dtype = getattr(torch, lora_rank.CASES[case][1])
    base = load_file(folder / "model" / "model.safetensors")
    start = load_file(folder / "adapter" / "adapter_model.safetensors")
    size = adapter_size(Model(path=str(folder / "model")), LORA)
    assert size.matrices == 2 * 7 == len(start) / 2
    assert size.parameters == sum(t.numel() for t in start.values())
    for rank in range(ranks):
        found = kept(folder, case, ranks, rank)
        assert not found["has_reference_model"]
        assert found["trained"] <= size.parameters + 64, "the optimizer holds more than the adapters (and padding)"
        assert found["base"].keys() == base.keys()
        for name, tensor in base.items():
            assert found["base"][name].dtype == dtype
            assert torch.equal(found["base"][name], tensor.to(dtype)), f"{name} changed"
        assert any(not torch.equal(found["adapter"][name], start[name].to(dtype)) for name in start)


@pytest.mark.parametrize("case", list(lora_rank.CASES))
def test_the_reference_stays_the_base_model_while_the_policy_moves(folder, case):
    found = kept(folder, case, 2)
    for before, after, later in zip(found["before"], found["after"], found["later"], strict=True):
        assert np.array_equal(before["ref_logprobs"], after["ref_logprobs"])
        assert np.array_equal(before["ref_logprobs"], later["ref_logprobs"])
        assert not np.array_equal(before["old_logprobs"], after["old_logprobs"])
        assert not np.array_equal(after["old_logprobs"], later["old_logprobs"])
        assert np.abs(before["ref_logprobs"] - before["old_logprobs"]).max() > 0.1


def test_with_adapters_off_the_model_is_the_base_exactly(folder):
    _, packed = prepared_batch(ranks=1)
    model = Model(path=str(folder / "model"), dtype="float32", device="cpu")
    policy = load_policy(model, resolve("cpu"), lora=LORA.model_copy(update={"adapter": str(folder / "adapter")}))
    base = load_policy(model, resolve("cpu"))
    with torch.no_grad():
        expected, on = base(packed, TEMPERATURE)[0], policy(packed, TEMPERATURE)[0]
        with adapters_off(policy.hf_model):
            off = policy(packed, TEMPERATURE)[0]
        again = policy(packed, TEMPERATURE)[0]
    assert torch.equal(off, expected)
    assert torch.equal(on, again)
    assert (on - off).abs().max() > 0.1
    assert all(p.requires_grad == ("lora_" in name) for name, p in policy.hf_model.named_parameters())


def prepared_batch(ranks: int):
    """All trajectories in one micro-batch, shared prompts."""
    from orchestration.model.prepared_batch import to_device

    batch = packed_batch(EVERYONE, 10**6, ranks, True)[0][0]
    return batch, to_device(batch, "cpu")


def test_a_fresh_adapter_changes_nothing_and_its_seed_is_its_own(folder):
    model = Model(path=str(folder / "model"), dtype="float32", device="cpu")
    state = torch.get_rng_state()
    first = dict(adapter_tensors(load_policy(model, resolve("cpu"), lora=LORA).hf_model))
    torch.manual_seed(99)
    policy = load_policy(model, resolve("cpu"), lora=LORA)
    again = dict(adapter_tensors(policy.hf_model))
    other = dict(adapter_tensors(load_policy(model, resolve("cpu"), lora=Lora(**lora_rank.LORA, seed=1)).hf_model))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(torch.equal(first[name], other[name]) == (".lora_B." in name) for name in first)
    _, packed = prepared_batch(ranks=1)
    with torch.no_grad():
        assert torch.equal(policy(packed)[0], load_policy(model, resolve("cpu"))(packed)[0])
    torch.set_rng_state(state)
    load_policy(model, resolve("cpu"), lora=LORA)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("case", list(lora_rank.CASES))
@pytest.mark.parametrize("ranks", [1, 2])
def test_merged_is_base_plus_scaled_product_rounded_once(folder, case, ranks):
    """In float32 from the untouched base; and every rank has the whole of it."""
    for rank in range(ranks):
        found = kept(folder, case, ranks, rank)
        assert found["merged"].keys() == found["base"].keys()
        for name, base in found["base"].items():
            key = f"base_model.model.{name.removesuffix('.weight')}.lora_{{}}.weight"
            expected = base
            if key.format("A") in found["adapter"]:
                a, b = (found["adapter"][key.format(which)].double() for which in "AB")
                expected = (base.double() + 1.5 * b @ a).to(base.dtype)
            one_unit = 2.0**-7 if base.dtype == torch.bfloat16 else 2.0**-20
            torch.testing.assert_close(found["merged"][name], expected, rtol=one_unit, atol=1e-6)
            assert torch.equal(found["merged"][name], base) == (key.format("A") not in found["adapter"])


@pytest.mark.parametrize("case", ["zero1", "zero3"])
def test_a_checkpoint_gives_the_policy_back(folder, case):
    """The adapter by PEFT, by our own start_from, and the merged model by transformers: the same logits."""
    saved, found = folder / f"saved_{case}_2", kept(folder, case, 2)
    by_peft = plain_peft(folder, saved / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float64, attn_implementation="eager")
    assert type(merged) is LlamaForCausalLM
    assert not (saved / "adapter_config.json").exists(), "transformers would apply the adapter a second time"
    assert json.loads((saved / "adapter" / "adapter_config.json").read_text())["target_modules"] == "all-linear"
    tensors = read_adapter(saved / "adapter").tensors
    assert all(torch.equal(tensors[name], tensor) for name, tensor in found["adapter"].items())
    for t in make_trajectories()[:3]:
        with torch.no_grad():
            expected = logprobs_of(by_peft, t)
            torch.testing.assert_close(logprobs_of(merged, t), expected, rtol=0, atol=1e-5)
    model = Model(path=str(folder / "model"), dtype="float32", device="cpu")
    lora = LORA.model_copy(update={"adapter": str(saved / "adapter")})
    policy = load_policy(model, resolve("cpu"), lora=lora)
    assert all(torch.equal(t, found["adapter"][name]) for name, t in adapter_tensors(policy.hf_model))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama_tied", "gemma3"])
def test_every_linear_layer_but_the_head_gets_an_adapter_with_plain_pefts_gradient(family, tmp_path):
    """Packed, shared prompts and gradient checkpointing, in float32; against PEFT on eager unpacked sequences, in float64."""
    torch.manual_seed(3)
    config = FAMILIES[family]()
    config.vocab_size = 64  # as the trajectories'
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    plain.save_pretrained(tmp_path / "model")
    model = Model(path=str(tmp_path / "model"), dtype="float32", device="cpu", gradient_checkpointing=True)
    policy = load_policy(model, resolve("cpu"), lora=LORA)
    names = [name for name, _ in adapted(policy.hf_model)]
    kinds = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert len(names) == 2 * len(kinds)
    assert {name.rpartition(".")[2] for name in names} == kinds
    assert adapter_size(model, LORA).matrices == len(names)
    tensors = random_adapter(policy.hf_model, seed=2, size=0.1)
    load_adapter(policy.hf_model, tensors, "test")
    save_adapter(tmp_path / "adapter", tensors, LORA, model.path)
    peft = PeftModel.from_pretrained(plain.double(), tmp_path / "adapter", is_trainable=True).double()
    batch, packed = prepared_batch(ranks=1)
    factors = torch.randn(sum(GROUPS), 100, generator=torch.Generator().manual_seed(0))
    loss, expected = torch.zeros(()), torch.zeros((), dtype=torch.float64)
    predicted = policy.train()(packed, TEMPERATURE)[0]
    for row, index in enumerate(batch.trajectory_index):
        own, theirs = (
            predicted[batch.sequence == row],
            logprobs_of(peft, batch_of(EVERYONE, make_trajectories())[0][index]),
        )
        torch.testing.assert_close(own.double(), theirs, rtol=1e-4, atol=1e-4)
        loss = loss + (own * factors[index, : len(own)]).sum()
        expected = expected + (theirs * factors[index, : len(own)].double()).sum()
    loss.backward()
    expected.backward()
    gradients = {name.replace(".default", ""): p.grad for name, p in peft.named_parameters() if p.requires_grad}
    for name, layer in adapted(policy.hf_model):
        for which in "AB":
            found = getattr(layer, f"lora_{which}")["default"].weight.grad
            key = f"base_model.model.{name}.lora_{which}.weight"
            size = float(gradients[key].abs().max())
            assert size > 1e-4, f"{key} has no gradient: the test shows nothing"
            torch.testing.assert_close(found.double(), gradients[key], rtol=1e-3, atol=1e-4 * size, msg=key)


@pytest.mark.parametrize(
    ("targets", "why"),
    [
        (["q_proj", "k_porj"], r"has no module 'k_porj'; did you mean k_proj\? \(it has down_proj, gate_proj, k_proj"),
        (["lm_head"], "'lm_head' is the language-model head in LlamaForCausalLM"),
        (["mlp"], "'mlp' is no linear layer"),
        (["embed_tokens"], "'embed_tokens' is no linear layer"),
    ],
)
def test_a_target_that_cannot_be_is_refused_before_weights_are_loaded(folder, targets, why):
    model, lora = Model(path=str(folder / "model"), device="cpu"), Lora(target_modules=targets)
    with pytest.raises(ValueError, match=why):
        adapter_size(model, lora)
    with pytest.raises(ValueError, match=why):
        load_policy(model, resolve("cpu"), lora=lora)


@pytest.mark.parametrize("family", ["mixtral", "glm4_moe"])
def test_experts_are_refused_before_weights_are_loaded_with_what_works(family, tmp_path):
    AutoModelForCausalLM.from_config(MIXTURES[family]()).save_pretrained(tmp_path)
    model = Model(path=str(tmp_path), dtype="float32", device="cpu")
    why = r"mixtures of experts, which cannot have adapters here; use \[k_proj, o_proj, q_proj, v_proj\]"
    for refused in (adapter_size, lambda model, lora: load_policy(model, resolve("cpu"), lora=lora)):
        with pytest.raises(ValueError, match=why):
            refused(model, LORA)
    lora = LORA.model_copy(update={"target_modules": ["k_proj", "o_proj", "q_proj", "v_proj"]})
    found = dict(adapter_tensors(load_policy(model, resolve("cpu"), lora=lora).hf_model))
    assert adapter_size(model, lora).parameters == sum(t.numel() for t in found.values())


@pytest.mark.parametrize("targets", ["all-linear", ["c_attn"]])
def test_a_model_without_linear_layers_is_refused(targets, tmp_path):
    AutoModelForCausalLM.from_config(NOISY["gpt2"]()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no linear layers beside its head"):
        adapter_size(Model(path=str(tmp_path), device="cpu"), Lora(target_modules=targets))


def test_targets_may_be_some_layers_only(folder):
    model = Model(path=str(folder / "model"), dtype="float32", device="cpu")
    lora = Lora(target_modules=["v_proj", "layers.1.mlp.up_proj"])
    policy = load_policy(model, resolve("cpu"), lora=lora)
    found = [name for name, _ in adapted(policy.hf_model)]
    assert found == [f"model.layers.{place}" for place in ("0.self_attn.v_proj", "1.self_attn.v_proj", "1.mlp.up_proj")]
    assert adapter_size(model, lora).parameters == sum(t.numel() for _, t in adapter_tensors(policy.hf_model))
    with pytest.raises(ValidationError, match="'target_modules' is empty"):
        Lora(target_modules=[])


def test_merging_again_and_again_does_not_drift(folder):
    """Each merge starts from the base, which is not written to."""
    model = Model(path=str(folder / "model"), dtype="bfloat16", device="cpu")
    hf_model = load_policy(model, resolve("cpu"), lora=LORA).hf_model
    base = {name: p.clone() for name, p in hf_model.named_parameters() if not p.requires_grad}
    for seed in range(20):
        load_adapter(hf_model, random_adapter(hf_model, seed), "test")
        first = dict(merged_tensors(hf_model))
    again = dict(merged_tensors(hf_model))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(torch.equal(p, base[name]) for name, p in hf_model.named_parameters() if name in base)
    load_adapter(hf_model, {name: torch.zeros_like(t) for name, t in adapter_tensors(hf_model)}, "test")
    untouched = {name.replace(".base_layer", ""): t for name, t in base.items()}
    assert all(torch.equal(t, untouched[name]) for name, t in merged_tensors(hf_model))


def test_in_bfloat16_merging_loses_what_the_adapter_keeps(folder):
    """Why engines take adapters: an update far below a weight's last bit is gone after merging, and is not in the policy."""
    model = Model(path=str(folder / "model"), dtype="bfloat16", device="cpu")
    policy = load_policy(model, resolve("cpu"), lora=LORA)
    load_adapter(policy.hf_model, random_adapter(policy.hf_model, seed=3, size=0.004), "test")
    base = {name.replace(".base_layer", ""): p for name, p in policy.hf_model.named_parameters() if not p.requires_grad}
    merged = dict(merged_tensors(policy.hf_model))
    changed = sum(int((merged[name] != base[name]).sum()) for name in base)
    assert changed < 0.1 * sum(p.numel() for p in base.values())
    _, packed = prepared_batch(ranks=1)
    with torch.no_grad():
        on = policy.float()(packed)[0]
        with adapters_off(policy.hf_model):
            assert (policy(packed)[0] - on).abs().max() > 1e-4
