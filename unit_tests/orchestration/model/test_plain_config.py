"""A config.json is read without transformers only where transformers would accept it and find the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from orchestration.model.plain_config import KEYS, PlainConfig, plain_config
from unit_tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    return json.loads((folder / "config.json").read_text())


def changed(folder: Path, original: dict[str, Any], change: dict[str, Any]) -> PlainConfig | None:
    (folder / "config.json").write_text(json.dumps({**original, **change}))
    return plain_config(folder)


@pytest.mark.parametrize("change", [{}, {"num_key_value_heads": None, "head_dim": None}, {"tie_word_embeddings": True}])
def test_numbers_are_those_of_transformers(tmp_path: Path, original: dict[str, Any], change: dict[str, Any]) -> None:
    plain = changed(tmp_path, original, change)
    assert plain is not None
    whole = AutoConfig.from_pretrained(tmp_path)
    for key in PlainConfig.__dataclass_fields__:
        if (value := getattr(plain, key)) is not None:
            assert getattr(whole, key) == value, key


def test_every_wrong_type_is_left_to_transformers(tmp_path: Path, original: dict[str, Any]) -> None:
    """Those of other keys too: transformers refuses them, and preflight must."""
    for key in KEYS:
        for wrong in ("text", 1.5, [1], {"a": 1}, None):
            if type(wrong) not in KEYS[key]:
                assert changed(tmp_path, original, {key: wrong}) is None, f"{key}: {wrong!r}"


def test_whatever_is_understood_transformers_accepts(tmp_path: Path, original: dict[str, Any]) -> None:
    for key, kinds in KEYS.items():
        for value in (None, True, 2, 0.5, "text", ["LlamaForCausalLM"]):
            if type(value) in kinds and changed(tmp_path, original, {key: value}) is not None:
                AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "qwen2"},
        {"auto_map": {"AutoConfig": "a.B"}},
        {"hidden_size": 0},
        {"hidden_size": 18},
        {"quantization_config": {}},
        {"architectures": [1]},
        {"dtype": "float33"},
        {"initializer_range": 2.0},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
    ],
)
def test_what_is_not_plain_is_left_to_transformers(
    tmp_path: Path, original: dict[str, Any], change: dict[str, Any]
) -> None:
    assert changed(tmp_path, original, change) is None


def test_a_file_that_is_no_configuration(tmp_path: Path) -> None:
    assert plain_config(tmp_path) is None
    (tmp_path / "config.json").write_text("[1")
    assert plain_config(tmp_path) is None
    (tmp_path / "config.json").write_text("[1]")
    assert plain_config(tmp_path) is None
