"""A real vLLM engine beside the transformers model whose weights it should hold: small, in float32, far from flat."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from orchestration.model.checkpoint_names import as_in_checkpoint
from orchestration.weight_transfer.file_publisher import WeightPublisher
from rollouts.vllm.engine import VLLMEngine
from rollouts.vllm.response import Generation
from rollouts.vllm.sampling import Sampling

VOCABULARY = 131  # not a multiple of 64: vLLM pads its rows
PROMPTS = [list(range(3, 3 + length)) for length in (5, 17, 40, 70)]  # the longer ones span several cache blocks


def random_model(seed: int) -> LlamaForCausalLM:
    """A float32 Llama with tied embeddings whose distribution is far from flat."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def write_tokenizer(folder: Path) -> None:
    """Token 7 is the word w007, and so on."""
    core = Tokenizer(models.WordLevel({f"w{i:03d}": i for i in range(VOCABULARY)}, unk_token="w000"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w001", unk_token="w000").save_pretrained(folder)


def published_tensors(model: LlamaForCausalLM) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


@torch.no_grad()
def reference_logprobs(model: LlamaForCausalLM, prompt: list[int], made: Generation, temperature: float) -> np.ndarray:
    """Of the generated tokens, by transformers in float64. [T]"""
    ids = torch.tensor([prompt + made.token_ids.tolist()])
    logits = model.double()(ids).logits[0, len(prompt) - 1 : -1] / temperature
    chosen = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None]).squeeze(1)
    model.float()
    return chosen.numpy().astype(np.float32)


class Pair:
    """One engine with an event loop of its own, and the model whose weights it should hold."""

    def __init__(
        self, folder: Path, lora_rank: int | None = None, build: Callable[[int], Any] = random_model, **engine: Any
    ) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = folder
        self.build = build
        self.model = build(0)
        self.model.save_pretrained(folder / "model")
        write_tokenizer(folder / "model")
        self.engine = VLLMEngine(
            str(folder / "model"), dtype="float32", device="cpu", max_model_len=512, threads=1, lora_rank=lora_rank,
            engine={"kv_cache_memory_bytes": 64 * 1024**2, **engine},
        )  # fmt: skip
        self.run(self.engine.start())
        assert self.engine.tokens_generated() == 0, "nobody asked for any"
        self.version = 0

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(call)

    def generate(self, sampling: Sampling, step: int = 0, samples: int = 1) -> list[Generation]:
        async def all_at_once() -> list[Generation]:
            calls = [
                self.engine.generate(prompt, sampling, step, f"p{i}", sample)
                for i, prompt in enumerate(PROMPTS)
                for sample in range(samples)
            ]
            return await asyncio.gather(*calls)

        return self.run(all_at_once())

    async def begin(self, prompt: list[int], sampling: Sampling, samples: int) -> list[asyncio.Task[Generation]]:
        """Start responses, and return when they have their first tokens: a short one beside them is then finished."""
        calls = [asyncio.create_task(self.engine.generate(prompt, sampling, 0, "p", i)) for i in range(samples)]
        await self.engine.generate(prompt, Sampling(max_new_tokens=4), 0, "p", 0)
        return calls

    def sync(self, publisher: WeightPublisher, seed: int) -> None:
        """New random weights, published and loaded."""
        self.model = self.build(seed)
        self.version += 1
        tensors = as_in_checkpoint(self.model, published_tensors(self.model))
        update = publisher.publish(self.version, tensors)
        self.run(self.engine.load_weights(self.version, update))

    def gap(self, made: list[Generation], temperature: float) -> float:
        """Largest |engine - transformers| log-probability, in nats."""
        pairs = zip(PROMPTS, made, strict=True)
        return max(np.abs(reference_logprobs(self.model, p, m, temperature) - m.logprobs).max() for p, m in pairs)

    def close(self) -> None:
        self.run(self.engine.shutdown())
        self.loop.close()
