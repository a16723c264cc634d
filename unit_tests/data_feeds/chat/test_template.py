"""A tokenizer or chat template that is wrong ends in one message, whatever it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_feeds.chat import template
from data_feeds.chat.template import load_prompt_tokenizer, render_chat

MESSAGES = [{"role": "user", "content": "1 + 1"}]


@pytest.mark.parametrize(
    "text",
    [
        "{{ 1 / 0 }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{{ 'a' * 10 ** 14 }}",
        "{{ 'a'.center(-10 ** 30) }}",
        "{{ messages[0].nothing.more }}",
        "{{ 'a' + 1 }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_fails_or_does_not_end(tiny_folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "SECONDS", 0.5)
    (tiny_folder / "chat_template.jinja").write_text(text)
    settings = json.loads((tiny_folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (tiny_folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_prompt_tokenizer(str(tiny_folder))
    with pytest.raises(ValueError, match=r"the chat template of .* refuses messages with roles .*user.*change the"):
        render_chat(tokenizer, MESSAGES)


@pytest.mark.parametrize(
    ("file", "value"),
    [
        *(("tokenizer.json", value) for value in ([], {}, None, "x", {"added_tokens": 5, "model": {}})),
        *(("tokenizer_config.json", value) for value in ([], "x", 5)),
    ],
)
def test_files_that_are_no_tokenizer(tiny_folder: Path, file: str, value: Any) -> None:
    (tiny_folder / file).write_text(json.dumps(value))
    with pytest.raises(ValueError, match=r"model\.path: .*tokenizer"):
        load_prompt_tokenizer(str(tiny_folder))
