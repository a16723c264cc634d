"""A real vLLM engine takes adapters from real publishers, and is checked against transformers and PEFT."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel

from configs.blocks.lora import Lora
from data_feeds.packing import pack
from data_feeds.responses import Responses
from orchestration.model.lora import adapter_description, adapter_tensors, add_adapters, load_adapter
from orchestration.rl.weight_probe import TOLERANCE_BY_DTYPE, ProbeFailed, compare
from orchestration.weight_transfer.file_publisher import WeightPublisher
from rollouts.vllm.engine import WeightLoadError
from rollouts.vllm.response import Generation
from rollouts.vllm.sampling import Sampling
from unit_tests.e2e.engine_pair import (
    PROMPTS,
    Pair,
    published_tensors,
    random_model,
    reference_logprobs,
)
from unit_tests.orchestration.ranks.ranks import Ranks
from unit_tests.orchestration.trainer.test_trainer import make_trajectories
from unit_tests.tiny_model import CHAT_TEMPLATE

pytestmark = pytest.mark.e2e

LORA = Lora(rank=4, alpha=6, rank_stabilised=True)
SAMPLING = Sampling(max_new_tokens=24)


class AdapterPair(Pair):
    """One engine with an event loop of its own, and the model with adapters whose weights it should hold."""

    def __init__(self, folder: Path) -> None:
        extension = "unit_tests.e2e.forgetful_adapter.ForgetfulAdapterExtension"
        super().__init__(folder, LORA.rank, worker_extension_cls=extension)
        (folder / "model" / "chat_template.jinja").write_text(CHAT_TEMPLATE)  # a trainer saves it with its checkpoints
        add_adapters(self.model, LORA)

    def change(self, seed: int) -> list[tuple[str, torch.Tensor]]:
        """New random adapters in the model, and the tensors to send."""
        generator = torch.Generator().manual_seed(seed)
        tensors = {n: 0.25 * torch.randn(t.shape, generator=generator) for n, t in adapter_tensors(self.model)}
        load_adapter(self.model, tensors, "test")
        return list(tensors.items())

    def sync(self, publisher: WeightPublisher, seed: int) -> None:
        tensors = self.change(seed)
        self.version += 1
        update = publisher.publish(self.version, tensors, adapter_description(self.model, LORA))
        self.run(self.engine.load_weights(self.version, update))

    def forget(self, forgets: str = "", skips: bool = False) -> None:
        self.run(self.engine._llm.collective_rpc("forget_adapter", args=(forgets, skips)))

    def mean_gap(self, made: list[Generation] | None = None) -> float:
        """Raises ProbeFailed: the engine does not compute with the model's adapter."""
        made = made or self.generate(SAMPLING)
        ours = [reference_logprobs(self.model, p, m, 1.0) for p, m in zip(PROMPTS, made, strict=True)]
        return compare([m.logprobs for m in made], ours, TOLERANCE_BY_DTYPE["float32"]).sums["sync/probe_gap_mean"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, rank_groups: dict[int, Ranks]) -> Iterator[AdapterPair]:
    """An engine beside the session's trainer ranks, which the last test needs: all are in one process of tests."""
    pair = AdapterPair(tmp_path_factory.mktemp("adapters"))
    yield pair
    pair.close()


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[WeightPublisher]:
    publisher = WeightPublisher("direct", tmp_path / "weights")
    yield publisher
    publisher.close()


def test_before_the_first_sync_the_engine_is_the_base(pair: AdapterPair) -> None:
    """Alone catches an engine that begins with another adapter than zeros."""
    assert pair.version == 0
    assert pair.mean_gap() < 1e-5


@pytest.mark.parametrize("method", ["direct", "disk"])
def test_the_engine_computes_with_the_published_adapter(pair: AdapterPair, tmp_path: Path, method: Any) -> None:
    """Alone catches an adapter that vLLM takes and does not apply, or scales otherwise."""
    pair.generate(SAMPLING)  # fills the prefix cache under the old adapter
    publisher = WeightPublisher(method, tmp_path / "weights")
    for seed in (1, 2):
        pair.sync(publisher, seed=100 * len(method) + seed)
        made = pair.generate(SAMPLING)
        assert pair.mean_gap(made) < 1e-5
        assert all((m.versions == pair.version).all() for m in made)
    publisher.close()
    assert pair.engine.version() == pair.version


def test_an_update_in_flight_leaves_both_versions_in_a_response(pair: AdapterPair, publisher: WeightPublisher) -> None:
    """Alone catches running responses that keep the old adapter's keys and values."""
    pair.sync(publisher, seed=3)
    old, old_version, prompt = copy.deepcopy(pair.model), pair.version, PROMPTS[2]
    update = publisher.publish(old_version + 1, pair.change(seed=4), adapter_description(pair.model, LORA))

    async def update_while_generating() -> list[Generation]:
        long = Sampling(max_new_tokens=400)
        calls = [asyncio.create_task(pair.engine.generate(prompt, long, 0, "p", i)) for i in range(4)]
        await pair.engine.generate(prompt, Sampling(max_new_tokens=4), 0, "p", 0)
        await pair.engine.load_weights(old_version + 1, update)
        return await asyncio.gather(*calls)

    made = pair.run(update_while_generating())
    pair.version = old_version + 1
    crossed = [m for m in made if len(set(m.versions.tolist())) == 2]
    assert crossed, "no response was running when the adapter changed"
    for generation in crossed:
        by_old = generation.versions == old_version
        gap_to_old = np.abs(reference_logprobs(old, prompt, generation, 1.0) - generation.logprobs)
        gap_to_new = np.abs(reference_logprobs(pair.model, prompt, generation, 1.0) - generation.logprobs)
        assert gap_to_old[by_old].max() < 1e-3
        assert gap_to_new[~by_old].max() < 1e-3
        assert gap_to_old[~by_old].mean() > 0.1


def test_the_probe_catches_an_adapter_that_is_not_applied(pair: AdapterPair, publisher: WeightPublisher) -> None:
    """Alone catches a probe that takes the base for the policy."""
    pair.forget("to zeros", skips=True)
    pair.sync(publisher, seed=5)
    with pytest.raises(ProbeFailed, match="mean gap"):
        pair.mean_gap()
    pair.forget()
    pair.sync(publisher, seed=6)
    assert pair.mean_gap() < 1e-5
    pair.change(seed=7)  # the trainer moves on, the engine is not told
    with pytest.raises(ProbeFailed, match="mean gap"):
        pair.mean_gap()


@pytest.mark.parametrize("rate", [1e-5, 1e-6, 1e-7])
def test_an_old_adapter_is_found_at_any_learning_rate(
    pair: AdapterPair, publisher: WeightPublisher, rate: float
) -> None:
    """Alone catches a worker that keeps the adapter of the version before after a small step."""
    pair.sync(publisher, seed=10)
    for forgets in ("to old", "to zeros"):
        tensors = {n: t.detach() + rate * torch.sign(torch.randn(t.shape)) for n, t in adapter_tensors(pair.model)}
        load_adapter(pair.model, tensors, "test")
        pair.version += 1
        update = publisher.publish(pair.version, list(tensors.items()), adapter_description(pair.model, LORA))
        pair.forget(forgets)
        with pytest.raises(WeightLoadError, match=r"the adapter \(28 of 28 factors\)"):
            pair.run(pair.engine.load_weights(pair.version, update))
        pair.forget()
        pair.run(pair.engine.load_weights(pair.version, update))
    assert pair.mean_gap() < 1e-5


def test_what_is_not_the_whole_adapter_is_refused(pair: AdapterPair, publisher: WeightPublisher) -> None:
    """Alone catches an adapter that is taken though a part is missing, doubled, unknown or of another rank."""
    tensors, told = pair.change(seed=8), adapter_description(pair.model, LORA)
    renamed = [(name.replace("q_proj", "w_proj"), t) for name, t in tensors]

    def refused(update: dict[str, Any], why: str) -> None:
        with pytest.raises(WeightLoadError, match=why):
            pair.run(pair.engine.load_weights(update["version"], update))
        with pytest.raises(WeightLoadError, match=why):
            pair.generate(SAMPLING)

    version = pair.version + 1
    refused(publisher.publish(version, tensors[:-1], told), "27 tensors came, which are not an A and a B")
    refused(publisher.publish(version, tensors[:-2], told), "for each of 14 layers")
    refused(publisher.publish(version, [*tensors, tensors[0]], told), "sent twice")
    refused(publisher.publish(version, renamed, told), r"no layer for 2 parts of the adapter: .*w_proj")
    refused(publisher.publish(version, [(n, t[:, :2]) for n, t in tensors], told), "are not of rank 4")
    refused(
        publisher.publish(version, published_tensors(random_model(1))), "a whole model came to an engine that takes"
    )
    corrupted = publisher.publish(version, tensors, told)
    with open(corrupted["path"], "r+b") as file:
        file.seek(corrupted["size_bytes"] // 2)
        file.write(b"\xff\x00\xff")
    refused(corrupted, "checksum")

    pair.sync(publisher, seed=9)  # a whole one mends it
    assert pair.mean_gap() < 1e-5


def test_the_engine_computes_as_two_trainer_ranks_under_zero_3(
    pair: AdapterPair, rank_groups: dict[int, Ranks]
) -> None:
    """Alone catches an adapter that ranks under ZeRO-3 gather wrongly: PEFT judges the checkpoint of the same weights."""
    trajectories = make_trajectories()
    ones = np.ones(len(trajectories), dtype=np.float32)
    advantages = np.where(np.arange(len(trajectories)) % 2, 1.0, -1.0).astype(np.float32)
    responses = Responses(trajectories)
    columns = responses.columns(0, advantages=advantages)
    batches = pack(responses, np.arange(len(trajectories)), ones / 100, columns, 60, 2, True)
    (pair.folder / "micro_batches.pkl").write_bytes(pickle.dumps(batches))
    rank_groups[2].run("unit_tests.e2e.lora_sync_rank", pair.folder)
    update = json.loads((pair.folder / "update.json").read_text())
    pair.version = update["version"]
    pair.run(pair.engine.load_weights(pair.version, update))
    saved = PeftModel.from_pretrained(random_model(0), pair.folder / "saved")
    made = pair.generate(SAMPLING)
    by_base = [reference_logprobs(random_model(0), p, m, 1.0) for p, m in zip(PROMPTS, made, strict=True)]
    by_peft = [reference_logprobs(saved, p, m, 1.0) for p, m in zip(PROMPTS, made, strict=True)]
    assert (
        compare([m.logprobs for m in made], by_peft, TOLERANCE_BY_DTYPE["float32"]).sums["sync/probe_gap_mean"] < 1e-5
    )
    with pytest.raises(ProbeFailed):
        compare([m.logprobs for m in made], by_base, TOLERANCE_BY_DTYPE["float32"])
