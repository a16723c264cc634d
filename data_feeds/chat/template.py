"""Turn chat messages into token ids by the model's own chat template. Prompts are tokenised nowhere else."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from data_feeds.chat.plain_tokenizer import plain_tokenizer

SECONDS = 20.0  # of the processor, for one conversation


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a model folder or hub name. It has a chat template.

    Raises:
        ValueError: the path holds no tokenizer, or one without a chat template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # its files are read without checks, so a wrong one raises anything
        raise ValueError(
            f"model.path: no tokenizer could be loaded from '{path}': {_first_line(error)}; give a model folder that "
            "holds its tokenizer"
        ) from error
    check_chat_template(tokenizer, path)
    return tokenizer


def load_prompt_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """Return a tokenizer that can turn prompts into token ids, if possible without importing transformers.

    Raises:
        ValueError: the path holds no tokenizer, or one without a chat template.
    """
    try:
        plain = plain_tokenizer(path)
    except Exception:  # noqa: BLE001 transformers then raises the error that says what is wrong
        plain = None
    return plain or load_tokenizer(path, trust_remote_code)


def check_chat_template(tokenizer: Any, path: str = "") -> None:
    """Raise ValueError when the tokenizer has no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"model.path: the tokenizer of '{path or tokenizer.name_or_path}' has no chat template; use an "
            "instruction-tuned model, or put a chat_template.jinja into the model folder"
        )


def render_chat(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    """Return the token ids of the messages with the generation prompt, ready for the assistant's turn.

    Raises:
        ValueError: there is no chat template, or it refuses these messages, as for a role that it does not know.
    """
    ids = _apply_template(tokenizer, messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    return [int(i) for i in ids]


def render_text(tokenizer: Any, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
    """Return the messages as the text that is tokenised.

    Raises:
        ValueError: there is no chat template, or it refuses these messages, as for a role that it does not know.
    """
    return str(_apply_template(tokenizer, messages, tokenize=False, add_generation_prompt=add_generation_prompt))


def _apply_template(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> Any:
    check_chat_template(tokenizer)
    try:
        with _bounded():
            return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # a template is a program, and may raise anything
        roles = [m.get("role") for m in messages]
        raise ValueError(
            f"the chat template of '{tokenizer.name_or_path}' refuses messages with roles {roles}: "
            f"{_first_line(error) or type(error).__name__}; change the messages or the template"
        ) from error


@contextmanager
def _bounded() -> Iterator[None]:
    """Raise TimeoutError when the block takes more than SECONDS of the processor. Only the main thread is bounded, in
    which every prompt is rendered before a run begins."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {SECONDS:g} s to render")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
