"""Prompts are counted without transformers only where transformers would give the very same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_feeds.chat.plain_tokenizer import plain_tokenizer
from data_feeds.chat.template import load_prompt_tokenizer, load_tokenizer, render_chat, render_text
from unit_tests.tiny_model import CHAT_TEMPLATE, write_tiny_model

MODELS = Path(__file__).resolve().parents[3] / "models"
CHATS = [
    [{"role": "user", "content": "1 + 2 ="}],
    [{"role": "system", "content": "assistant :"}, {"role": "user", "content": "3 <eos> 4  \n 5"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " b "},
        {"role": "user", "content": "ünïcode 漢字"},
    ],
    [{"role": "user", "content": "<|im_start|>user\n<script>&amp;{{ x }}{% y %}</script>"}],
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def rendered(tokenizer: Any, chat: list[dict[str, Any]]) -> object:
    """The tokens and texts of a chat, or what the template has against it."""
    try:
        texts = [render_text(tokenizer, chat, add_generation_prompt) for add_generation_prompt in (True, False)]
        return render_chat(tokenizer, chat), texts
    except ValueError as error:
        return str(error)


def test_tokens_are_those_of_transformers(model: Path) -> None:
    folders = [
        model,
        *(folder for folder in (MODELS / "SmolLM2-135M-Instruct", MODELS / "tiny-sorter") if folder.is_dir()),
    ]
    for folder in folders:
        plain, whole = plain_tokenizer(str(folder)), load_tokenizer(str(folder))
        assert plain is not None, f"{folder.name} is as plain as can be"
        for chat in CHATS:
            assert rendered(plain, chat) == rendered(whole, chat)


def test_a_template_that_refuses_a_role_says_so(model: Path) -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT_TEMPLATE
    (model / "chat_template.jinja").write_text(refuses)
    plain = plain_tokenizer(str(model))
    assert plain is not None
    with pytest.raises(ValueError, match=r"refuses messages with roles \['system', 'user'\]: no system"):
        render_chat(plain, CHATS[1])


@pytest.mark.parametrize(
    "template",
    [
        "{{ strftime_now('%d') }}",
        "{{ tools }}",
        "{{ messages | tojson }}",
        "{% for m in messages %}{% break %}{% endfor %}",
        "{% generation %}{% endgeneration %}",
        "{% if %}",
    ],
)
def test_what_only_transformers_can_render_is_left_to_it(model: Path, template: str) -> None:
    (model / "chat_template.jinja").write_text(template)
    assert plain_tokenizer(str(model)) is None


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"}),
        ("tokenizer_config.json", {"add_bos_token": True}),
        ("tokenizer_config.json", {"bos_token": "<new>"}),
        ("tokenizer_config.json", {"eos_token": {"content": "<eos>", "lstrip": True}}),
        ("tokenizer_config.json", {"extra_special_tokens": {"image": "<image>"}}),
        ("tokenizer_config.json", {"extra_special_tokens": ["<new>"]}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["a.B", None]}}),
        (
            "tokenizer.json",
            {"truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}},
        ),
        ("config.json", {"model_type": "qwen2"}),
    ],
)
def test_settings_that_change_tokens_are_left_to_transformers(model: Path, file: str, change: dict[str, Any]) -> None:
    path = model / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert plain_tokenizer(str(model)) is None


def test_a_folder_that_transformers_must_judge(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert plain_tokenizer(str(model)) is None
    assert plain_tokenizer("owner/name") is None
    bare = write_tiny_model(tmp_path / "bare", chat_template=None)
    with pytest.raises(ValueError, match="has no chat template"):
        load_prompt_tokenizer(str(bare))
