"""A half-million-parameter Llama and its task: sort, copy or reverse four digits. Made in a second, learns in a minute.

Supervised examples show "sort" answered in either direction, ascending three times in ten: the model can sort and does
not know which way is wanted. Sampled responses are right about one time in five; greedy ones, which take the likelier
direction, almost never. Reinforcement learning finds the direction, and sharpens the sorting. Which digits are held out
is decided by their multiset, over all tasks: no training prompt, supervised or not, reorders a held-out one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_feeds.chat.template import render_chat
from records.rollout import Prompt, Trajectory

TASKS = ("sort", "copy", "reverse")
LENGTH = 4  # digits per prompt
PAD, END, UNKNOWN, USER, ASSISTANT = "<pad>", "<end>", "<unknown>", "<user>", "<assistant>"
VOCABULARY = (PAD, END, UNKNOWN, USER, ASSISTANT, *TASKS, *"0123456789")
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}" + USER + " {{ m.content }} "
    "{% elif m.role == 'assistant' %}" + ASSISTANT + " {{ m.content }} " + END + " "
    "{% else %}{{ raise_exception('this model knows user and assistant only') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)
HELDOUT_SHARE = 0.2  # of the 715 multisets of four digits
# The ways to answer, and the share of each (task, way) among supervised examples.
ANSWERS: dict[str, Callable[[Sequence[Any]], list[Any]]] = {
    "ascending": sorted,
    "descending": lambda digits: sorted(digits, reverse=True),
    "copy": list,
    "reverse": lambda digits: list(reversed(digits)),
}
SFT_MIXTURE = {
    ("sort", "ascending"): 0.24,
    ("sort", "descending"): 0.56,
    ("copy", "copy"): 0.1,
    ("reverse", "reverse"): 0.1,
}


def solve(task: str, digits: Sequence[int]) -> str:
    """Return the right answer as the model writes it: digits with spaces between. Sorting is ascending."""
    return _written("ascending" if task == "sort" else task, digits)


def _written(way: str, digits: Sequence[int]) -> str:
    return " ".join(map(str, ANSWERS[way](digits)))


def question(task: str, digits: Iterable[int]) -> list[dict[str, Any]]:
    """Return the chat messages of one task."""
    return [{"role": "user", "content": f"{task} {' '.join(map(str, digits))}"}]


def is_heldout(digits: Iterable[int]) -> bool:
    """Return whether these digits, in whatever order, are held out."""
    text = " ".join(map(str, sorted(digits)))
    return int(hashlib.blake2b(text.encode(), digest_size=4).hexdigest(), 16) < HELDOUT_SHARE * 2**32


def all_digits(heldout: bool) -> list[tuple[int, ...]]:
    """Return those of the 10,000 inputs that are on one side of the split, in order."""
    return [d for d in itertools.product(range(10), repeat=LENGTH) if is_heldout(d) == heldout]


def sft_examples(n: int, seed: int) -> list[tuple[list[dict[str, Any]], str]]:
    """Return `n` supervised examples (messages, answer) in the shares of SFT_MIXTURE, drawn with replacement."""
    rng = np.random.default_rng([seed, 0])
    digits = all_digits(heldout=False)
    kinds = list(SFT_MIXTURE)
    chosen = rng.choice(len(kinds), size=n, p=list(SFT_MIXTURE.values()))
    picks = rng.integers(len(digits), size=n)
    return [
        (question(kinds[k][0], digits[i]), _written(kinds[k][1], digits[i])) for k, i in zip(chosen, picks, strict=True)
    ]


def sft_trajectories(n: int, seed: int, tokenizer: Any) -> list[Trajectory]:
    """Return the `sft_examples` as records: the answer's tokens and the end token are actions, to be trained on."""
    trajectories = []
    for index, (messages, answer) in enumerate(sft_examples(n, seed)):
        ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        trajectories.append(
            Trajectory(
                prompt=Prompt(f"sft/{index}", messages, answer, "sft"),
                group_id=f"sft/{index}",
                sample=0,
                prompt_ids=np.asarray(render_chat(tokenizer, messages), dtype=np.int32),
                token_ids=np.asarray(ids, dtype=np.int32),
                behavior_logprobs=np.zeros(len(ids), dtype=np.float32),
                versions=np.zeros(len(ids), dtype=np.int32),
                is_action=np.ones(len(ids), dtype=np.bool_),
                turn=np.zeros(len(ids), dtype=np.int32),
                response=answer,
                finish_reason="stop",
            )
        )
    return trajectories


def write_data(out: str | Path, train_rows: int = 2000, heldout_rows: int = 200, seed: int = 0) -> tuple[Path, Path]:
    """Write `train.jsonl` and `heldout.jsonl` of sorting prompts (columns prompt, answer) into `out`; return both."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng([seed, 1])
    paths = (out / "train.jsonl", out / "heldout.jsonl")
    for path, rows, heldout in zip(paths, (train_rows, heldout_rows), (False, True), strict=True):
        digits = all_digits(heldout)
        if rows > len(digits):
            raise ValueError(f"{path.name}: {rows} rows asked for, there are {len(digits)} different ones")
        lines = []
        for index in rng.permutation(len(digits))[:rows]:
            chosen = digits[index]
            row = {"prompt": question("sort", chosen)[0]["content"], "answer": solve("sort", chosen)}
            lines.append(json.dumps(row) + "\n")
        path.write_text("".join(lines), encoding="utf-8")
    return paths


def make_tokenizer() -> Any:
    """Return a word-level tokenizer of 18 tokens with a chat template; `<end>` is its end token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token=UNKNOWN,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_untrained(out: str | Path, seed: int = 0) -> Path:
    """Write a freshly initialised Llama (0.52 million parameters, float32, head dimension 32) with its tokenizer, in
    Hugging Face format. The same seed gives the same weights."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=32,  # a round number above the vocabulary's
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    out = Path(out)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out
