"""A model folder of a few kilobytes, in Hugging Face format, for tests of everything that reads one."""

from __future__ import annotations

from pathlib import Path

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)
WORDS = ["<unk>", "<eos>", "system", "user", "assistant", ":", "+", "=", *map(str, range(20))]


def write_tiny_model(folder: Path, chat_template: str | None = CHAT_TEMPLATE, tied: bool = True) -> Path:
    """Write a random Llama of 2 layers and a word tokenizer into `folder`; returns it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM runs on a CPU
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return folder
