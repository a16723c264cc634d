"""A model path is understood, or refused with the way out, before weights are loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from configs.blocks.rl import Model
from orchestration.model.checkpoint_facts import find_model, model_facts
from unit_tests.tiny_model import WORDS, write_tiny_model


def counted(folder: Path) -> int:
    from transformers import AutoModelForCausalLM

    return sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())


def test_sizes_are_those_of_the_loaded_model(tiny_folder: Path, tmp_path: Path) -> None:
    facts = model_facts(Model(path=str(tiny_folder)))
    assert facts.parameters == counted(tiny_folder)
    assert (facts.layers, facts.hidden, facts.heads, facts.kv_heads, facts.head_dim) == (2, 16, 4, 2, 32)
    assert facts.vocabulary == len(WORDS) and facts.kv_values_per_token == 2 * 2 * 2 * 32
    untied = write_tiny_model(tmp_path / "untied", tied=False)
    assert model_facts(Model(path=str(untied))).parameters == counted(untied) == facts.parameters + len(WORDS) * 16


def test_sizes_without_safetensors_come_from_the_configuration(tiny_folder: Path) -> None:
    expected = counted(tiny_folder)
    (tiny_folder / "model.safetensors").rename(tiny_folder / "pytorch_model.bin")
    assert model_facts(Model(path=str(tiny_folder))).parameters == expected


def refused(path: Path | str) -> str:
    with pytest.raises(ValueError) as caught:
        model_facts(Model(path=str(path)))
    assert str(caught.value).startswith("model.path: ")
    return str(caught.value)


def test_broken_folders(tiny_folder: Path) -> None:
    weights = tiny_folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert f"is cut off: {len(whole) - 100} of {len(whole)} bytes" in refused(tiny_folder)
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "is no whole .safetensors file (43 bytes)" in refused(tiny_folder)
    weights.unlink()
    assert "has no weights" in refused(tiny_folder)
    weights.write_bytes(whole)
    (tiny_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-2.safetensors"}}))
    assert "lacks model-2.safetensors, which model.safetensors.index.json names" in refused(tiny_folder)
    (tiny_folder / "model.safetensors.index.json").unlink()
    (tiny_folder / "config.json").write_text("{")
    assert "does not understand its config.json" in refused(tiny_folder)
    (tiny_folder / "config.json").write_text(json.dumps({"model_type": "t5"}))
    assert "is a t5, which is no causal language model" in refused(tiny_folder)
    (tiny_folder / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"]}))
    assert "is a BertForMaskedLM, which is no causal language model" in refused(tiny_folder)
    (tiny_folder / "config.json").unlink()
    assert "is no model folder: it has no config.json" in refused(tiny_folder)
    (tiny_folder / "adapter_config.json").write_text("{}")
    assert "is a LoRA adapter" in refused(tiny_folder)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_size": -5}, {"vocab_size": "x"}, {"num_attention_heads": 0}, {"hidden_size": 0}, {"num_hidden_layers": None},
        {"num_key_value_heads": -1}, {"architectures": 5}, {"rope_parameters": []}, {"intermediate_size": [1]},
    ],
)  # fmt: skip
def test_a_configuration_that_makes_no_model(tiny_folder: Path, wrong: dict[str, Any]) -> None:
    config = json.loads((tiny_folder / "config.json").read_text())
    (tiny_folder / "config.json").write_text(json.dumps({**config, **wrong}))
    assert "config.json" in refused(tiny_folder)


@pytest.mark.parametrize("header", [[], {"a": 5}, {"a": {}}, {"a": {"data_offsets": [0], "shape": []}}, {"a": None}])
def test_headers_that_describe_no_tensors(tiny_folder: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    (tiny_folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(100))
    assert "is no .safetensors file" in refused(tiny_folder)
    shutil.copyfile(tiny_folder / "config.json", tiny_folder / "model.safetensors.index.json")
    (tiny_folder / "model.safetensors.index.json").write_text(text.decode() if header == [] else "[")
    assert "is no index of weights" in refused(tiny_folder)


def test_missing_folders(tiny_folder: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tiny_folder.parent)
    assert f"there is no folder {tiny_folder.parent}/tinny; did you mean {tiny_folder}?" in refused(
        tiny_folder.parent / "tinny"
    )
    assert "there is no folder models/SmolLM2-135M-Instruct; `python -m data_prep.smollm2` makes it" in refused(
        "models/SmolLM2-135M-Instruct"
    )
    assert "there is no folder tiny/sub; give a folder in Hugging Face format" in refused("tiny/sub")
    assert "is a file; give the folder that holds config.json" in refused(tiny_folder / "config.json")


def test_hub_names(tiny_folder: Path, monkeypatch: Any) -> None:
    from huggingface_hub import constants

    monkeypatch.chdir(tiny_folder)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "is not in the local cache while HF_HUB_OFFLINE is set" in refused("someone/some-model")
    assert "neither a folder nor a hub name" in refused("some model!")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    assert "http://127.0.0.1:9 cannot be reached" in refused("someone/some-model")


def test_a_cached_hub_model_is_its_folder(tiny_folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from huggingface_hub import constants

    repository = tmp_path / "hub" / "models--someone--tiny"
    snapshot = repository / "snapshots" / ("0" * 40)
    shutil.copytree(tiny_folder, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    assert find_model("someone/tiny") == snapshot
