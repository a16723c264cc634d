"""Tokenise prompts without transformers, whose import takes several seconds.

This is done only where the result is certain to be the same: the tokenizer is just its tokenizer.json, and the chat
template is plain Jinja.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Only these classes of transformers use tokenizer.json unchanged, and only these settings do not change how text is
# encoded. With any other class or setting, transformers must load the tokenizer.
CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
HARMLESS = {
    "backend", "chat_template", "clean_up_tokenization_spaces", "extra_special_tokens", "is_local", "local_files_only",
    "model_max_length", "tokenizer_class", *SPECIAL,
}  # fmt: skip
MODEL_TYPES = ("llama",)  # for these, transformers uses the tokenizer class that tokenizer_config.json names
MOST_CHARACTERS = 100_000_000  # of a conversation; its tokens need a hundred times as much memory
# A template that uses other names (the date, tools, transformers' own filters) is left to transformers.
TEMPLATE_NAMES = {"messages", "add_generation_prompt", "raise_exception", "namespace", "range", *SPECIAL}


class PlainTokenizer:
    """The part of a transformers tokenizer that prompts need: it turns messages into token ids."""

    def __init__(self, folder: str, tokenizer: Any, template: Any, chat_template: str, special: dict[str, str]) -> None:
        self.name_or_path, self.chat_template = folder, chat_template
        self._tokenizer, self._template, self._special = tokenizer, template, special

    def apply_chat_template(
        self, messages: list[dict[str, Any]], tokenize: bool, add_generation_prompt: bool, return_dict: bool = False
    ) -> str | list[int]:
        """Return the messages as text, or as token ids."""
        assert not return_dict, "ids or text only"
        text: str = self._template.render(
            messages=messages, add_generation_prompt=add_generation_prompt, **self._special
        )
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"it makes a text of {len(text):,} characters")
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids) if tokenize else text


def plain_tokenizer(path: str) -> PlainTokenizer | None:
    """Return the tokenizer of a model folder, or None where only transformers knows how to load it."""
    folder = Path(path)
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        model_type = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
        file = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # transformers then raises the error that says what is wrong
        return None
    special = {name: settings[name] for name in SPECIAL if settings.get(name) is not None}
    known = {token["content"] for token in file.get("added_tokens", [])}
    extra = settings.get("extra_special_tokens", [])
    if (
        model_type not in MODEL_TYPES
        or settings.get("tokenizer_class") not in CLASSES
        or settings.keys() - HARMLESS
        or not isinstance(extra, list)
        or any(token not in known for token in [*special.values(), *extra] if isinstance(token, str))
        or not all(isinstance(token, str) for token in [*special.values(), *extra])
        or file.get("truncation") is not None
        or file.get("padding") is not None
    ):
        return None
    chat_template = _chat_template(folder, settings)
    template = _compiled(chat_template) if chat_template else None
    if template is None or chat_template is None:
        return None
    from tokenizers import Tokenizer

    return PlainTokenizer(path, Tokenizer.from_file(str(folder / "tokenizer.json")), template, chat_template, special)


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """Return the text of the only chat template; None when there is none, or transformers would have to choose."""
    file, inline = folder / "chat_template.jinja", settings.get("chat_template")
    if (folder / "additional_chat_templates").exists() or (folder / "chat_template.json").exists():
        return None
    if file.is_file():
        return file.read_text(encoding="utf-8") if inline is None else None
    return inline if isinstance(inline, str) else None


def _compiled(chat_template: str) -> Any:
    """Return the template as transformers compiles it; None when it uses anything that Jinja itself does not have."""
    import jinja2
    from jinja2 import meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    try:
        names = meta.find_undeclared_variables(environment.parse(chat_template))
    except jinja2.TemplateError:
        return None
    if names - TEMPLATE_NAMES or "tojson" in chat_template:
        return None
    return environment.from_string(chat_template)
