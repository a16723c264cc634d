"""From chat messages to token ids, by the model's own chat template. The one place that tokenises prompts."""

from __future__ import annotations

from typing import Any


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model folder or hub name, checked to have a chat template.

    Raises:
        ValueError: the path holds no tokenizer, or one without a chat template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path: no tokenizer could be loaded from '{path}': {_first_line(error)}") from error
    check_chat_template(tokenizer, path)
    return tokenizer


def check_chat_template(tokenizer: Any, path: str = "") -> None:
    """Raise ValueError, naming the model and the way out, when the tokenizer has no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"model.path: the tokenizer of '{path or tokenizer.name_or_path}' has no chat template; use an "
            "instruction-tuned model, or put a chat_template.jinja into the model folder"
        )


def render_chat(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    """Token ids of the messages, ready for the assistant's turn (generation prompt included).

    Raises:
        ValueError: as render_text.
    """
    ids = _applied(tokenizer, messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    return [int(i) for i in ids]


def render_text(tokenizer: Any, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
    """The messages as the text that is tokenised; with `add_generation_prompt`, ready for the assistant's turn.

    Raises:
        ValueError: there is no chat template, or it refuses these messages (roles it does not know, for instance).
    """
    return str(_applied(tokenizer, messages, tokenize=False, add_generation_prompt=add_generation_prompt))


def _applied(tokenizer: Any, messages: list[dict[str, Any]], **how: Any) -> Any:
    import jinja2

    check_chat_template(tokenizer)
    try:
        return tokenizer.apply_chat_template(messages, **how)
    except (jinja2.TemplateError, TypeError) as error:  # TypeError: a template that adds text to what is no text
        roles = [m.get("role") for m in messages]
        raise ValueError(
            f"the chat template of '{tokenizer.name_or_path}' refuses messages with roles {roles}: {error}"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
