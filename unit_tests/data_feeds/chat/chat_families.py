"""Tokenizers and chat templates in the formats of well-known families, and what each should make of a chat, written down a
second time in plain Python: pieces of text, learned or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

Messages = list[dict[str, Any]]
Pieces = list[tuple[str, bool]]
SMOLLM2 = Path(__file__).parents[3] / "models" / "SmolLM2-135M-Instruct"
CORPUS = [
    "What is the capital of France? It is Paris. Why so? Because it is. user assistant model system think",
    "\n\n  two blanks \n and  \n\n lines \t tab.\n Grüße 你好 日本 😀 well, that is it! [INST] [/INST] :)",
]
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHATML = """
{%- if messages[0].role != 'system' and system %}{{ '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
DEFAULT_SYSTEM = "You are helpful."
QWEN25 = "{% set system = '" + DEFAULT_SYSTEM + "' %}" + CHATML
MARKED = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}
{%- generation %}{{ m.content }}CLOSED{% endgeneration %}OPEN{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
END = "{{ '<|im_end|>\\n' }}"
MARKED_WITH_END = MARKED.replace("CLOSED", END).replace("OPEN", "")
MARKED_WITHOUT_END = MARKED.replace("CLOSED", "").replace("OPEN", END)
QWEN3 = """
{%- set ns = namespace(asked=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set parts = m.content.split('</think>') %}
{%- set thought = parts[0].split('<think>')[-1].strip('\\n') if parts | length > 1 else '' %}
{%- set said = parts[-1].lstrip('\\n') if parts | length > 1 else m.content %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.asked and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' + said.lstrip('\\n') }}
{%- else %}
{{- said }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA3 = """
{{- bos_token }}
{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
ALTERNATE = """
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('user and assistant must take turns') }}{% endif %}{% endfor %}"""
GEMMA = (
    "{{ bos_token }}"
    + ALTERNATE
    + """
{%- for m in messages %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
)
MISTRAL = (
    "{{ bos_token }}"
    + ALTERNATE
    + """
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}
{%- endfor %}"""
)


@dataclass(frozen=True)
class Family:
    name: str
    tokenizer: Callable[[], Any]
    pieces: Callable[[Messages], Pieces]  # the whole chat; concatenated they are its rendering
    takes_system: bool = True


def byte_level(template: str, *special: str, bos: str | None = None, eos: str = "<|im_end|>") -> Any:
    """Byte-level BPE with GPT-4-like words, as Qwen and Llama 3 have it: line breaks in a row are one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, min_frequency=1, initial_alphabet=alphabet, show_progress=False)
    return _finished(tokenizer, trainer, template, special, bos, eos)


def metaspace(template: str, *special: str, bos: str, eos: str) -> Any:
    """SentencePiece-like BPE with bytes for what it does not know, as Mistral and Gemma have it."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()],
    )
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, min_frequency=1, special_tokens=["<unk>", *bytes_], show_progress=False, max_token_length=8
    )
    return _finished(tokenizer, trainer, template, special, bos, eos)


def _finished(
    tokenizer: Tokenizer, trainer: Any, template: str, special: tuple[str, ...], bos: str | None, eos: str
) -> Any:
    words = [w for text in CORPUS for w in text.replace("😀", "").replace("日本", "").split(" ")]
    tokenizer.train_from_iterator([*CORPUS[:1], *words] if trainer.special_tokens else CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos)
    made.chat_template = template
    made.name_or_path = "made/for-tests"
    return made


def pieces_chatml(messages: Messages, system: str | None = None) -> Pieces:
    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    made: Pieces = []
    for m in messages:
        made.append((f"<|im_start|>{m['role']}\n", False))
        made.append((f"{m['content']}<|im_end|>", m["role"] == "assistant"))
        made.append(("\n", False))
    return made


def pieces_qwen3(messages: Messages) -> Pieces:
    """Only a last message that is the assistant's has its (here empty) thinking block."""
    made = pieces_chatml(messages)
    if messages[-1]["role"] == "assistant":
        made[-2] = ("<think>\n\n</think>\n\n" + made[-2][0].lstrip("\n"), True)
    return made


def pieces_llama3(messages: Messages) -> Pieces:
    made: Pieces = [("<|begin_of_text|>", False)]
    for m in messages:
        made.append((f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n", False))
        made.append((f"{m['content'].strip()}<|eot_id|>", m["role"] == "assistant"))
    return made


def pieces_gemma(messages: Messages) -> Pieces:
    made: Pieces = [("<bos>", False)]
    for m in messages:
        is_model = m["role"] == "assistant"
        made.append((f"<start_of_turn>{'model' if is_model else m['role']}\n", False))
        made.append((f"{m['content'].strip()}<end_of_turn>", is_model))
        made.append(("\n", False))
    return made


def pieces_mistral(messages: Messages) -> Pieces:
    made: Pieces = [("<s>", False)]
    for m in messages:
        if m["role"] == "user":
            made.append((f"[INST] {m['content']} [/INST]", False))
        else:
            made.append((f" {m['content'].strip()}</s>", True))
    return made


@cache
def smollm2() -> Any:
    if not SMOLLM2.is_dir():
        pytest.skip("models/SmolLM2-135M-Instruct is not there; python -m data_prep.smollm2 makes it")
    return AutoTokenizer.from_pretrained(SMOLLM2)


IM = ("<|im_start|>", "<|im_end|>")
HEADERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
FAMILIES = [
    Family("smollm2 (the real one)", smollm2, lambda m: pieces_chatml(m, SMOLLM2_SYSTEM)),
    Family("qwen2.5", cache(lambda: byte_level(QWEN25, *IM)), lambda m: pieces_chatml(m, DEFAULT_SYSTEM)),
    Family("qwen3", cache(lambda: byte_level(QWEN3, *IM)), pieces_qwen3),
    Family(
        "llama3",
        cache(lambda: byte_level(LLAMA3, *HEADERS, bos="<|begin_of_text|>", eos="<|eot_id|>")),
        pieces_llama3,
    ),
    Family(
        "gemma",
        cache(lambda: metaspace(GEMMA, "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", bos="<bos>", eos="<eos>")),
        pieces_gemma,
        takes_system=False,
    ),
    Family(
        "mistral",
        cache(lambda: metaspace(MISTRAL, "<s>", "</s>", "[INST]", "[/INST]", bos="<s>", eos="</s>")),
        pieces_mistral,
        takes_system=False,
    ),
    Family("marks with end", cache(lambda: byte_level(MARKED_WITH_END, *IM)), pieces_chatml),
    Family("marks without end", cache(lambda: byte_level(MARKED_WITHOUT_END, *IM)), pieces_chatml),
]
