"""Real vLLM engines take weights from real publishers, and are checked against transformers. Nearly all tests share one
engine; what happens to responses meanwhile is in test_in_flight.py."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.blocks.lora import Lora
from orchestration.cluster.devices import resolve
from orchestration.model.lora import adapter_tensors, add_adapters, load_adapter, merged_tensors
from orchestration.rl.weight_probe import TOLERANCE_BY_DTYPE, ProbeFailed, compare
from orchestration.weight_transfer.broadcaster import WeightBroadcaster
from orchestration.weight_transfer.file_publisher import WeightPublisher
from rollouts.vllm.engine import WeightLoadError
from rollouts.vllm.response import Generation
from rollouts.vllm.sampling import Sampling
from rollouts.vllm.weight_file import TensorInfo
from unit_tests.e2e.engine_pair import PROMPTS, Pair, published_tensors, random_model, reference_logprobs

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
LORA = Lora(rank=4, alpha=6, rank_stabilised=True)


@pytest.fixture
def pair(plain_pair: Pair) -> Pair:
    return plain_pair


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[WeightPublisher]:
    publisher = WeightPublisher("direct", tmp_path / "weights")
    yield publisher
    publisher.close()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("method", ["direct", "disk"])
def test_engine_holds_the_published_weights(pair: Pair, tmp_path: Path, method: Any, temperature: float) -> None:
    """Alone catches an engine that computes with other weights than those it was sent, or with a cache from before."""
    sampling = Sampling(max_new_tokens=24, temperature=temperature)
    pair.generate(sampling)  # fills the prefix cache under the old weights
    publisher = WeightPublisher(method, tmp_path / "weights")
    pair.sync(publisher, seed=100 * len(method) + int(10 * temperature))
    made = pair.generate(sampling)
    publisher.close()
    assert pair.gap(made, temperature) < 1e-4
    assert all((m.versions == pair.version).all() for m in made)
    assert pair.engine.version() == pair.version


def test_an_engine_keeps_nothing_of_the_shared_memory(pair: Pair, publisher: WeightPublisher) -> None:
    """Alone catches weights that still lie in the memory which the next version is written over."""
    pair.sync(publisher, seed=32)
    publisher.publish(pair.version + 1, published_tensors(random_model(33)))
    assert pair.run(pair.engine._llm.collective_rpc("borrowed")) == [[]]
    assert pair.gap(pair.generate(Sampling(max_new_tokens=24)), 1.0) < 1e-4  # packed weights cannot be looked at


def test_adapters_merged_are_a_whole_model(pair: Pair, publisher: WeightPublisher) -> None:
    """Alone catches merged weights under names that an engine without adapters does not know."""
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
    """Alone catches greedy log-probabilities on another scale than the trainer's."""
    sampling = Sampling(max_new_tokens=8, temperature=0.0)
    assert pair.gap(pair.generate(sampling), temperature=1.0) < 1e-4


def test_tokens_end_with_the_end_of_sequence_token_or_at_the_limit(pair: Pair) -> None:
    """Alone catches a response that is cut, or goes on after its end."""
    for made in pair.generate(Sampling(max_new_tokens=32), samples=16):
        assert made.finish_reason == ("stop" if made.token_ids[-1] == 1 else "length")
        assert len(made.token_ids) == 32 or made.finish_reason == "stop"
        assert 1 not in made.token_ids[:-1]


def test_a_stop_string_ends_a_response_and_stays_in_its_tokens(pair: Pair) -> None:
    """Alone catches a stop string that vLLM takes out of the tokens, or that ends another response."""
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
    """Alone catches a running stream of random numbers behind seeded responses."""
    sampling = Sampling(max_new_tokens=12, seeded=True, run_seed=3)
    first, again = (pair.generate(sampling, step=1, samples=2) for _ in range(2))
    other_step = pair.generate(sampling, step=2, samples=2)
    tokens = [[m.token_ids.tolist() for m in made] for made in (first, again, other_step)]
    assert tokens[0] == tokens[1]
    assert all(a != b for a, b in zip(tokens[0], tokens[2], strict=True))
    assert all(tokens[0][i] != tokens[0][i + 1] for i in range(0, 8, 2))  # the two samples of a prompt


def test_a_partial_or_corrupted_update_is_refused(pair: Pair, publisher: WeightPublisher) -> None:
    """Alone catches a version that an engine takes though a part is missing, doubled, unknown or changed."""
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
    refused(publisher.publish(version, [*tensors, tensors[-1]]), "was sent twice")
    refused(publisher.publish(version, [*tensors, ("model.layers.0.bogus", torch.zeros(2))]), "bogus")
    corrupted = publisher.publish(version, tensors)
    with open(corrupted["path"], "r+b") as file:
        file.seek(corrupted["size_bytes"] // 2)
        file.write(b"\xff\x00\xff")
    refused(corrupted, "checksum")
    removed = publisher.publish(version, tensors)
    publisher.close()
    refused(removed, "cannot be mapped")

    pair.sync(publisher, seed=6)  # a whole version mends it
    assert pair.gap(pair.generate(sampling), 1.0) < 1e-4


def test_the_probe_catches_a_stale_tied_head(pair: Pair, publisher: WeightPublisher) -> None:
    """Alone catches a probe that does not see vLLM's packed head keep old weights."""
    sampling, tolerance = Sampling(max_new_tokens=8), TOLERANCE_BY_DTYPE["float32"]

    def mean_gap() -> float:
        made = pair.generate(sampling)
        ours = [reference_logprobs(pair.model, p, m, 1.0) for p, m in zip(PROMPTS, made, strict=True)]
        return compare([m.logprobs for m in made], ours, tolerance).sums["sync/probe_gap_mean"]

    def forget(forgets: bool) -> None:
        pair.run(pair.engine._llm.collective_rpc("forget", args=("head" if forgets else "",)))
        pair.run(pair.engine._llm.collective_rpc("skip_reading_back", args=(forgets,)))

    pair.sync(publisher, seed=8)
    assert mean_gap() < 1e-4
    forget(True)
    pair.sync(publisher, seed=9)
    with pytest.raises(ProbeFailed, match="mean gap"):
        mean_gap()
    forget(False)
    pair.sync(publisher, seed=10)
    assert mean_gap() < 1e-4


def stepped(pair: Pair, rate: float) -> list[tuple[str, torch.Tensor]]:
    """The pair's model after a step of this size, whose sign is that of a gradient."""
    generator = torch.Generator().manual_seed(0)
    for parameter in pair.model.parameters():
        parameter.data += rate * torch.sign(torch.randn(parameter.shape, generator=generator))
    return published_tensors(pair.model)


STALE = {
    "all": (("", (".*", 0, 10**6)), "in 1[0-9] parameters"),
    "the update": (("update", None), "everything: version"),
    "one layer": (("", (r"model\.layers\.1\..*", 0, 10**6)), r"model\.layers\.1\..*weight"),
    "one head's rows": (("", (r"model\.layers\.0\.self_attn\.qkv_proj", 32, 64)), r"layers\.0\.self_attn\.qkv_proj\.weight \(1 of 6"),
    "the tied head": (("head", None), r"in 1 parameters: model\.embed_tokens\.weight"),
}  # fmt: skip


@pytest.mark.parametrize("rate", [1e-5, 1e-6, 1e-7])
def test_whatever_keeps_old_weights_is_found_at_any_learning_rate(
    pair: Pair, publisher: WeightPublisher, rate: float
) -> None:
    """Alone catches a worker that computes with old weights after a step too small to show in log-probabilities."""
    pair.sync(publisher, seed=60)
    for forgotten, why in STALE.values():
        update = publisher.publish(pair.version + 1, stepped(pair, rate))
        pair.run(pair.engine._llm.collective_rpc("forget", args=forgotten))
        with pytest.raises(WeightLoadError, match=f"does not hold what it was sent.*{why}"):
            pair.run(pair.engine.load_weights(pair.version + 1, update))
        pair.run(pair.engine._llm.collective_rpc("forget", args=("",)))
        pair.run(pair.engine.load_weights(pair.version + 1, update))
        pair.version += 1
    assert pair.gap(pair.generate(Sampling(max_new_tokens=8)), 1.0) < 1e-4


class Sender:
    """A trainer's end of a weight group with the pair's engine."""

    def __init__(self, pair: Pair, workers: int = 1) -> None:
        self.pair, self.size = pair, 1 + workers
        self.pool = ThreadPoolExecutor(1)
        self.sender = WeightBroadcaster(resolve("cpu"), bucket_mib=0.05)

    def join(self) -> None:
        offer = self.sender.offer()
        told = {**offer, "first_rank": 1, "size": self.size, "timeout_seconds": 60.0, "join_seconds": 120.0}
        joining = self.pool.submit(self.sender.join, offer, self.size, 60.0, 120.0)
        self.pair.run(self.pair.engine.join_transfer(told))
        joining.result()

    async def push(self, version: int, tensors: list[tuple[str, torch.Tensor]]) -> None:
        sending = self.pool.submit(self.sender.send, version, tensors, [TensorInfo.of(*pair) for pair in tensors])
        await self.pair.engine.load_weights(version, {"version": version})
        sending.result()

    def sync(self, seed: int) -> None:
        """New random weights, broadcast and loaded."""
        self.pair.model, self.pair.version = random_model(seed), self.pair.version + 1
        self.pair.run(self.push(self.pair.version, published_tensors(self.pair.model)))


@pytest.fixture
def sender(pair: Pair) -> Iterator[Sender]:
    sender = Sender(pair)
    sender.join()
    yield sender
    sender.sender.close()
    sender.pool.shutdown()


def test_engine_holds_the_broadcast_weights_also_in_a_group_made_anew(pair: Pair, sender: Sender) -> None:
    """Alone catches a weight group that works only once."""
    sampling = Sampling(max_new_tokens=24)
    for seed in (41, 42):
        pair.generate(sampling)  # fills the prefix cache under the old weights
        sender.sync(seed)
        made = pair.generate(sampling)
        assert pair.gap(made, 1.0) < 1e-4
        assert all((m.versions == pair.version).all() for m in made)
        sender.join()


def test_every_token_is_of_one_version_while_weights_are_broadcast(pair: Pair, sender: Sender) -> None:
    """Alone catches a token that a broadcast under way gives a mixture of versions: transformers scores each of twenty
    updates."""
    first, models = pair.version, {pair.version: pair.model}
    for i in range(1, 21):
        models[first + i] = random_model(500 + i)
    prompt, sampling = PROMPTS[2], Sampling(max_new_tokens=150)

    async def generate_until(done: asyncio.Event, sample: int) -> list[Generation]:
        made = []
        while not done.is_set():
            made.append(await pair.engine.generate(prompt, sampling, len(made), "p", sample))
        return made

    async def sync_meanwhile() -> list[Generation]:
        done = asyncio.Event()
        calls = [asyncio.create_task(generate_until(done, sample)) for sample in range(4)]
        for version in list(models)[1:]:
            await asyncio.sleep(0.05)
            await sender.push(version, published_tensors(models[version]))
        done.set()
        return [one for made in await asyncio.gather(*calls) for one in made]

    made = pair.run(sync_meanwhile())
    pair.model, pair.version = models[first + 20], first + 20
    assert len({int(v) for m in made for v in m.versions}) > 10
    assert any(len(set(m.versions)) > 1 for m in made)
    for one in made:
        for version in set(one.versions.tolist()):
            gap = np.abs(reference_logprobs(models[version], prompt, one, 1.0) - one.logprobs)
            assert gap[one.versions == version].max() < 1e-4


def test_a_partial_or_corrupted_broadcast_is_refused(
    pair: Pair, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone catches the same of a broadcast, and a group that cannot go on after a refusal."""
    tensors, sampling = published_tensors(random_model(43)), Sampling(max_new_tokens=8)

    def refused(sent: list[tuple[str, torch.Tensor]], why: str) -> None:
        with pytest.raises(WeightLoadError, match=why):
            pair.run(sender.push(pair.version + 1, sent))
        with pytest.raises(WeightLoadError, match=why):
            pair.generate(sampling)
        sender.sender.close()
        sender.join()

    without_key = [(name, t) for name, t in tensors if "layers.1.self_attn.k_proj" not in name]
    refused(without_key, r"layers\.1\.self_attn\.qkv_proj \(6144 of 8192\)")
    refused([*tensors, tensors[-1]], "was sent twice")
    refused([*tensors, ("model.layers.0.bogus", torch.zeros(2))], "bogus")
    group = sender.sender.group
    assert group is not None
    send = group.broadcast

    def corrupted(tensor: torch.Tensor, src: int = 0) -> None:
        send(1 - tensor if len(tensor) > 10_000 else tensor, src)

    monkeypatch.setattr(group, "broadcast", corrupted)
    refused(tensors, "the bytes that came are not those sent")
    sender.sync(seed=44)  # a whole version mends it
    assert pair.gap(pair.generate(sampling), 1.0) < 1e-4


def test_a_trainer_killed_in_the_middle_of_a_broadcast_leaves_an_engine_that_refuses(
    pair: Pair, tmp_path: Path, publisher: WeightPublisher
) -> None:
    """Alone catches an engine that generates with a half of a version, or waits for the rest, when its sender is killed."""
    torch.save(published_tensors(random_model(45)), tmp_path / "tensors.pt")
    version = pair.version + 1
    arguments = ["60", str(tmp_path / "tensors.pt"), "0.2", str(version)]
    process = subprocess.Popen(
        [sys.executable, "-m", "unit_tests.orchestration.ranks.broadcast_sender", *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    told = {**json.loads(process.stdout.readline()), "first_rank": 1, "size": 2}
    pair.run(pair.engine.join_transfer({**told, "timeout_seconds": 60.0, "join_seconds": 60.0}))

    async def load_and_kill() -> float:
        loading = asyncio.create_task(pair.engine.load_weights(version, {"version": version}))
        for _ in range(4):
            await asyncio.to_thread(process.stdout.readline)
        os.kill(process.pid, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(WeightLoadError, match="broke off"):
            await loading
        return time.monotonic() - killed

    assert pair.run(load_and_kill()) < 50, "the time-out is 60 s"
    process.communicate()
    with pytest.raises(WeightLoadError, match="broke off"):
        pair.generate(Sampling(max_new_tokens=4))
    pair.sync(publisher, seed=46)  # by another method
    assert pair.gap(pair.generate(Sampling(max_new_tokens=8)), 1.0) < 1e-4


def test_every_worker_of_a_tensor_parallel_engine_takes_its_part_of_a_broadcast(tmp_path: Path) -> None:
    """Alone catches a second worker of an engine that is not in the weight group, or takes the first one's part."""
    pair = Pair(
        tmp_path, tensor_parallel_size=2, distributed_executor_backend="mp",
        worker_extension_cls="unit_tests.e2e.forgetful_receiver.ForgetfulExtension",
        weight_transfer_config={"backend": "forgetful"},
    )  # fmt: skip
    sender = Sender(pair, workers=2)
    sender.join()
    for seed in (47, 48):
        sender.sync(seed)
        assert pair.gap(pair.generate(Sampling(max_new_tokens=24)), 1.0) < 1e-4
    publisher = WeightPublisher("direct", tmp_path / "weights")
    for version, rate in enumerate([1e-5, 1e-6, 1e-7], pair.version + 1):
        update = publisher.publish(version, stepped(pair, rate))
        old_shard = ("", (r"model\.layers\.1\.mlp\.down_proj", 0, 10**6), 1)
        pair.run(pair.engine._llm.collective_rpc("forget", args=old_shard))
        with pytest.raises(WeightLoadError, match=r"worker 1 does not hold .*layers\.1\.mlp\.down_proj"):
            pair.run(pair.engine.load_weights(version, update))
        pair.run(pair.engine._llm.collective_rpc("forget", args=("",)))
        pair.run(pair.engine.load_weights(version, update))
    publisher.close()
    sender.sender.close()
    sender.pool.shutdown()
    pair.close()
