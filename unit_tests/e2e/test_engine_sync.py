"""Real vLLM engines take weights from real publishers, and are checked against transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from configs.lora import Lora
from orchestration.lora import adapter_tensors, add_adapters, load_adapter, merged_tensors
from orchestration.probe import TOLERANCE_BY_DTYPE, ProbeFailed, compare
from orchestration.weight_sync import WeightPublisher
from rollouts.engine import Generation, VLLMEngine, WeightLoadError
from rollouts.sampling import Sampling

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

LORA = Lora(rank=4, alpha=6, rank_stabilised=True)
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

    def __init__(self, folder: Path, **engine: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = folder
        self.model = random_model(0)
        self.model.save_pretrained(folder / "model")
        write_tokenizer(folder / "model")
        self.engine = VLLMEngine(
            str(folder / "model"), dtype="float32", device="cpu", max_model_len=512, threads=1,
            engine={"kv_cache_memory_bytes": 64 * 1024**2, **engine},
        )  # fmt: skip
        self.run(self.engine.start())
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
        self.model = random_model(seed)
        self.version += 1
        update = publisher.publish(self.version, published_tensors(self.model))
        self.run(self.engine.load_weights(self.version, update))

    def gap(self, made: list[Generation], temperature: float) -> float:
        """Largest |engine - transformers| log-probability, in nats."""
        pairs = zip(PROMPTS, made, strict=True)
        return max(np.abs(reference_logprobs(self.model, p, m, temperature) - m.logprobs).max() for p, m in pairs)

    def close(self) -> None:
        self.run(self.engine.shutdown())
        self.loop.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    receiver = "unit_tests.e2e.forgetful_receiver.ForgetfulExtension"
    pair = Pair(
        tmp_path_factory.mktemp("engine"),
        worker_extension_cls=receiver,
        weight_transfer_config={"backend": "forgetful"},
    )
    yield pair
    pair.close()


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[WeightPublisher]:
    publisher = WeightPublisher("direct", tmp_path / "weights")
    yield publisher
    publisher.close()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("method", ["direct", "disk"])
def test_engine_holds_the_published_weights(pair: Pair, tmp_path: Path, method: Any, temperature: float) -> None:
    sampling = Sampling(max_new_tokens=24, temperature=temperature)
    pair.generate(sampling)  # fills the prefix cache under the old weights
    publisher = WeightPublisher(method, tmp_path / "weights")
    pair.sync(publisher, seed=100 * len(method) + int(10 * temperature))
    made = pair.generate(sampling)
    publisher.close()
    assert pair.gap(made, temperature) < 1e-4
    assert all((m.versions == pair.version).all() for m in made)
    assert pair.engine.version() == pair.version


def test_adapters_merged_are_a_whole_model(pair: Pair, publisher: WeightPublisher) -> None:
    """Under the names the model has without them; for engines that take no adapters."""
    model = random_model(30)
    add_adapters(model, LORA)
    tensors = {name: 0.25 * torch.randn(t.shape) for name, t in adapter_tensors(model)}
    load_adapter(model, tensors, "test")
    pair.model, pair.version = model, pair.version + 1
    update = publisher.publish(pair.version, merged_tensors(model))
    pair.run(pair.engine.load_weights(pair.version, update))
    made = pair.generate(Sampling(max_new_tokens=24))
    assert pair.gap(made, 1.0) < 1e-3
    pair.model = random_model(30)  # the base alone
    assert pair.gap(made, 1.0) > 0.1
    pair.sync(publisher, seed=31)


def test_greedy_logprobs_are_those_of_temperature_one(pair: Pair) -> None:
    sampling = Sampling(max_new_tokens=8, temperature=0.0)
    assert pair.gap(pair.generate(sampling), sampling.trainer_temperature) < 1e-4


def test_tokens_end_with_the_end_of_sequence_token_or_at_the_limit(pair: Pair) -> None:
    for made in pair.generate(Sampling(max_new_tokens=32), samples=16):
        assert made.finish_reason == ("stop" if made.token_ids[-1] == 1 else "length")
        assert len(made.token_ids) == 32 or made.finish_reason == "stop"
        assert 1 not in made.token_ids[:-1]


def test_a_stop_string_ends_a_response_and_stays_in_its_tokens(pair: Pair) -> None:
    sampling = Sampling(max_new_tokens=64, seeded=True)
    freely = pair.generate(sampling)
    word = int(freely[0].token_ids[4])
    stopped = pair.generate(Sampling(max_new_tokens=64, seeded=True, stop=(f"w{word:03d}",)))
    for free, cut in zip(freely, stopped, strict=True):
        where = np.flatnonzero(free.token_ids == word)
        expected = free.token_ids[: where[0] + 1] if len(where) else free.token_ids
        assert cut.token_ids.tolist() == expected.tolist()
        assert len(cut.logprobs) == len(cut.versions) == len(cut.token_ids)
        assert cut.finish_reason == ("stop" if len(where) else free.finish_reason)


def test_seeds_are_a_function_of_step_prompt_and_sample(pair: Pair) -> None:
    sampling = Sampling(max_new_tokens=12, seeded=True, run_seed=3)
    first, again = (pair.generate(sampling, step=1, samples=2) for _ in range(2))
    other_step = pair.generate(sampling, step=2, samples=2)
    tokens = [[m.token_ids.tolist() for m in made] for made in (first, again, other_step)]
    assert tokens[0] == tokens[1]
    assert all(a != b for a, b in zip(tokens[0], tokens[2], strict=True))
    assert all(tokens[0][i] != tokens[0][i + 1] for i in range(0, 8, 2))  # the two samples of a prompt


def test_an_update_in_flight_leaves_both_versions_in_a_response(pair: Pair, publisher: WeightPublisher) -> None:
    old_model, old_version = pair.model, pair.version
    prompt, sampling = PROMPTS[2], Sampling(max_new_tokens=400)

    async def update_while_generating() -> list[Generation]:
        calls = await pair.begin(prompt, sampling, samples=8)
        await pair.engine.load_weights(old_version + 1, update)
        return await asyncio.gather(*calls)

    new_model = random_model(77)
    update = publisher.publish(old_version + 1, published_tensors(new_model))
    made = pair.run(update_while_generating())
    pair.model, pair.version = new_model, old_version + 1
    crossed = [m for m in made if len(set(m.versions.tolist())) == 2]
    assert crossed, "no response was running when the weights changed"
    for generation in crossed:
        assert (np.diff(generation.versions) >= 0).all()
        made_by_old = generation.versions == old_version
        old = np.abs(reference_logprobs(old_model, prompt, generation, 1.0) - generation.logprobs)
        new = np.abs(reference_logprobs(new_model, prompt, generation, 1.0) - generation.logprobs)
        assert old[made_by_old].max() < 1e-4
        assert new[~made_by_old].max() < 1e-4  # so the cache was recomputed under the new weights
        assert old[~made_by_old].mean() > 0.1


def test_abort_returns_what_there_is(pair: Pair) -> None:
    async def abort_while_generating() -> list[Generation]:
        calls = await pair.begin(PROMPTS[0], Sampling(max_new_tokens=450), samples=8)
        await pair.engine.abort()
        return await asyncio.gather(*calls)

    aborted = [m for m in pair.run(abort_while_generating()) if m.finish_reason == "abort"]
    assert aborted, "nothing was running when the engine was told to abort"
    for made in aborted:
        assert 0 < len(made.token_ids) < 450
        assert len(made.token_ids) == len(made.logprobs) == len(made.versions)


def test_nothing_is_generated_while_paused(pair: Pair) -> None:
    async def pause_and_resume() -> Generation:
        await pair.engine.pause()
        call = asyncio.ensure_future(pair.engine.generate(PROMPTS[0], Sampling(max_new_tokens=1), 0, "p", 0))
        done, _ = await asyncio.wait([call], timeout=0.5)
        assert not done
        await pair.engine.resume()
        return await call

    assert len(pair.run(pause_and_resume()).token_ids) == 1


def test_an_engine_wakes_from_sleep_with_its_weights(pair: Pair) -> None:
    pair.run(pair.engine.sleep())
    pair.run(pair.engine.wake())
    assert pair.gap(pair.generate(Sampling(max_new_tokens=8)), 1.0) < 1e-4


def test_a_partial_or_corrupted_update_is_refused(pair: Pair, publisher: WeightPublisher) -> None:
    model, sampling = random_model(5), Sampling(max_new_tokens=8)
    tensors = published_tensors(model)

    def refused(update: dict[str, Any], why: str) -> None:
        with pytest.raises(WeightLoadError, match=why):
            pair.run(pair.engine.load_weights(update["version"], update))
        with pytest.raises(WeightLoadError, match=why):
            pair.generate(sampling)

    version = pair.version + 1
    without_key = [(name, t) for name, t in tensors if "layers.1.self_attn.k_proj" not in name]
    refused(publisher.publish(version, without_key), r"layers\.1\.self_attn\.qkv_proj \(6144 of 8192\)")
    refused(publisher.publish(version, [*tensors, ("model.layers.0.bogus", torch.zeros(2))]), "bogus")
    corrupted = publisher.publish(version, tensors)
    with open(corrupted["path"], "r+b") as file:
        file.seek(corrupted["size_bytes"] // 2)
        file.write(b"\xff\x00\xff")
    refused(corrupted, "crc32")
    removed = publisher.publish(version, tensors)
    publisher.close()
    refused(removed, "cannot be mapped")

    pair.sync(publisher, seed=6)  # a whole version mends it
    assert pair.gap(pair.generate(sampling), 1.0) < 1e-4


def test_the_probe_catches_a_stale_tied_head(pair: Pair, publisher: WeightPublisher) -> None:
    sampling, tolerance = Sampling(max_new_tokens=8), TOLERANCE_BY_DTYPE["float32"]

    def mean_gap() -> float:
        made = pair.generate(sampling)
        ours = [reference_logprobs(pair.model, p, m, 1.0) for p, m in zip(PROMPTS, made, strict=True)]
        return compare([m.logprobs for m in made], ours, tolerance).mean_gap

    def forget(forgets: bool) -> None:
        pair.run(pair.engine._llm.collective_rpc("forget", args=(forgets,)))

    pair.sync(publisher, seed=8)
    assert mean_gap() < 1e-4
    forget(True)
    pair.sync(publisher, seed=9)
    with pytest.raises(ProbeFailed, match="mean gap"):
        mean_gap()
    forget(False)
    pair.sync(publisher, seed=10)
    assert mean_gap() < 1e-4
