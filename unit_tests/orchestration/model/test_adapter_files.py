"""Adapters on disk and merged, against PEFT; and what is said of folders that are no such thing."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from configs.blocks.lora import Lora
from configs.blocks.rl import Model
from orchestration.cluster.devices import resolve
from orchestration.model.adapter_files import (
    CONFIG,
    WEIGHTS,
    check_base,
    read_adapter,
    save_adapter,
    weights_fingerprint,
)
from orchestration.model.lora import adapter_tensors
from orchestration.model.merge_adapter import main, merge_adapter
from orchestration.model.policy_model import load_policy
from unit_tests.tiny_model import WORDS, write_tiny_model

LORA = Lora(rank=3, alpha=5, rank_stabilised=True)
IDS = torch.arange(len(WORDS))[None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tied embeddings, and an adapter as the trainer saves it."""
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(1)
    write_tiny_model(folder / "model")
    write_adapter(folder / "adapter", folder / "model", size=0.3)
    return folder


def write_adapter(folder: Path, model: Path, size: float) -> None:
    hf_model = load_policy(Model(path=str(model), dtype="float32", device="cpu"), resolve("cpu"), lora=LORA).hf_model
    generator = torch.Generator().manual_seed(2)
    tensors = {name: size * torch.randn(t.shape, generator=generator) for name, t in adapter_tensors(hf_model)}
    save_adapter(folder, tensors, LORA, str(model))


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.double()(input_ids=IDS).logits


def test_the_command_line_merges_what_peft_adds(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(made / "adapter"), str(tmp_path / "merged")]) == 0
    assert "merged into 14 matrices, float32" in capsys.readouterr().out
    base = AutoModelForCausalLM.from_pretrained(made / "model", dtype=torch.float64)
    before = logits(base)
    with_adapter = logits(PeftModel.from_pretrained(base, made / "adapter"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert merged.dtype == torch.float32
    torch.testing.assert_close(logits(merged), with_adapter, rtol=1e-5, atol=1e-6)
    assert (with_adapter - before).abs().max() > 0.01
    assert (tmp_path / "merged" / "tokenizer.json").exists()
    assert sorted(load_file(tmp_path / "merged" / "model.safetensors")) == sorted(
        load_file(made / "model" / "model.safetensors")
    )


def test_what_rounding_takes_from_an_update_is_said(made: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "small", made / "model", size=0.01)
    told = merge_adapter(str(tmp_path / "small"), str(tmp_path / "merged"), dtype="bfloat16")
    assert "rounding to bfloat16 changed the update by" in told and "--dtype float32" in told
    assert "rounding to" not in merge_adapter(str(tmp_path / "small"), str(tmp_path / "whole"))


def test_an_adapter_that_peft_saved_is_read(made: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(made / "model", dtype=torch.float32)
    torch.manual_seed(5)
    config = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    model.save_pretrained(tmp_path / "by_peft")
    found = read_adapter(tmp_path / "by_peft")
    assert (found.rank, found.scale, len(found.tensors), found.base_fingerprint) == (2, 4.0, 4, None)
    merge_adapter(str(tmp_path / "by_peft"), str(tmp_path / "merged"), base=str(made / "model"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-5, atol=1e-6)
    lora = Lora(rank=2, alpha=8, target_modules=["q_proj"], adapter=str(tmp_path / "by_peft"))
    ours = load_policy(Model(path=str(made / "model"), dtype="float32", device="cpu"), resolve("cpu"), lora=lora)
    ours.hf_model.set_attn_implementation("sdpa")  # the packed one takes packed sequences only
    torch.testing.assert_close(logits(ours.hf_model), logits(model), rtol=1e-6, atol=1e-7)


def start(made: Path, **changed) -> None:
    lora = LORA.model_copy(update={"adapter": str(made / "adapter"), **changed})
    load_policy(Model(path=str(made / "model"), dtype="float32", device="cpu"), resolve("cpu"), lora=lora)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"rank": 4},
            r"has rank 3 and scale 2.88675, but the lora block has rank 4 and scale 2.5; set lora.rank, alpha",
        ),
        ({"alpha": 6}, "scale 2.88675, but the lora block has rank 3 and scale 3.4641"),
        ({"target_modules": ["q_proj"]}, "does not fit this model with lora.rank and lora.target_modules: .* differs"),
        ({"adapter": "nowhere"}, "nowhere is no adapter in PEFT's format: it lacks adapter_config.json and"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(made: Path, changed: dict, why: str) -> None:
    start(made)
    with pytest.raises(ValueError, match=why):
        start(made, **changed)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("peft_type", "IA3", "holds a IA3 adapter; only LORA"),
        ("use_dora", True, "use_dora is True, which is not supported; merge"),
        ("rank_pattern", {"q_proj": 2}, "rank_pattern is {'q_proj': 2}"),
        ("modules_to_save", ["lm_head"], "modules_to_save is"),
    ],
)
def test_other_kinds_of_adapters_are_refused(made: Path, tmp_path: Path, key: str, value, why: str) -> None:
    shutil.copytree(made / "adapter", tmp_path / "other")
    config = json.loads((tmp_path / "other" / CONFIG).read_text())
    (tmp_path / "other" / CONFIG).write_text(json.dumps({**config, key: value}))
    with pytest.raises(ValueError, match=why):
        read_adapter(tmp_path / "other")


def test_another_base_model_is_refused(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(9)
    other = write_tiny_model(tmp_path / "other")
    assert weights_fingerprint(str(other)) != weights_fingerprint(str(made / "model"))
    shutil.copytree(made / "model", tmp_path / "copy")
    assert weights_fingerprint(str(tmp_path / "copy")) == weights_fingerprint(str(made / "model"))
    assert main([str(made / "adapter"), str(tmp_path / "out"), "--base", str(other)]) == 2
    assert "was trained on other weights than those of" in capsys.readouterr().err
    assert main([str(made / "adapter"), str(tmp_path / "out"), "--base", str(tmp_path / "gone")]) == 2
    assert "give its folder with --base" in capsys.readouterr().err
    assert main([str(made / "adapter"), str(made / "model")]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_part_for_no_layer_is_refused(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "adapter", tmp_path / "odd")
    tensors = load_file(tmp_path / "odd" / WEIGHTS)
    save_file({name.replace("q_proj", "w_proj"): t for name, t in tensors.items()}, tmp_path / "odd" / WEIGHTS)
    with pytest.raises(ValueError, match=r"has a part for model\.layers\.0\.self_attn\.w_proj\.weight, which Llama"):
        merge_adapter(str(tmp_path / "odd"), str(tmp_path / "out"))


def test_an_adapter_names_its_base_as_the_user_did(tmp_path):
    write_tiny_model(tmp_path / "model")
    save_adapter(tmp_path / "adapter", {}, LORA, str(tmp_path / "model"), "models/tiny")
    assert (
        json.loads((tmp_path / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == "models/tiny"
    )
    adapter = read_adapter(tmp_path / "adapter")
    assert adapter.base_path == "models/tiny"
    check_base(adapter, str(tmp_path / "model"), "adapter")
