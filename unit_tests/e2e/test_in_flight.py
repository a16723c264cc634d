"""What becomes of responses under way when a real engine takes new weights: every token is scored again by transformers,
under the weights of the version that the engine says made it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaForCausalLM

from orchestration.weight_transfer.file_publisher import WeightPublisher
from rollouts.vllm.engine import InFlight, LoadReport
from rollouts.vllm.response import Generation
from rollouts.vllm.sampling import Sampling
from unit_tests.e2e.engine_pair import PROMPTS, Pair, published_tensors, random_model, reference_logprobs
from unit_tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.e2e

TOLERANCE_NATS = 1e-3
SLEEP_SECONDS = 0.5
END = 1  # the end-of-sequence token
LOADS = 3  # while the long responses are under way
LONG = Sampling(max_new_tokens=400)
SHORT = Sampling(max_new_tokens=6)
PROMPT = PROMPTS[3]  # two whole cache blocks and a part of a third
Made = list[tuple[list[int], Generation]]  # prompts and what came of them


class Versions:
    """Publishes random models, made beforehand, as versions of a pair's engine, and remembers which was which."""

    def __init__(self, pair: Pair, folder: Path) -> None:
        self.pair, self.publisher = pair, WeightPublisher("direct", folder)
        self.models: dict[int, LlamaForCausalLM] = {pair.version: pair.model}
        self.coming = [random_model(1000 + pair.version + i) for i in range(LOADS)]

    async def load(self, in_flight: InFlight, to_score: Sequence[tuple[np.ndarray, np.ndarray]] = ()) -> LoadReport:
        pair, version = self.pair, self.pair.version + 1
        pair.model = self.models[version] = self.coming.pop()
        pair.version = version
        update = self.publisher.publish(version, published_tensors(pair.model))
        return await pair.engine.load_weights(version, update, in_flight, to_score)

    def gaps(self, prompt: list[int], made: Generation) -> np.ndarray:
        """|engine - transformers| of every token under the weights of its version, in nats. [T]"""
        ours = np.full(len(made.token_ids), np.nan, dtype=np.float32)
        for version in set(made.versions.tolist()):
            chosen = made.versions == version
            ours[chosen] = reference_logprobs(self.models[version], prompt, made, 1.0)[chosen]
        return np.abs(ours - made.logprobs)


@pytest.fixture
def versions(plain_pair: Pair, tmp_path: Path) -> Iterator[Versions]:
    versions = Versions(plain_pair, tmp_path / "weights")
    yield versions
    versions.publisher.close()


def begun(pair: Pair, prompt: list[int], sampling: Sampling, samples: int) -> list[asyncio.Task[Generation]]:
    calls: list[Coroutine[Any, Any, Generation]] = [
        pair.engine.generate(prompt, sampling, pair.version, f"p{len(prompt)}", sample) for sample in range(samples)
    ]
    return [asyncio.create_task(call) for call in calls]


async def tokens_later(pair: Pair, tokens: int) -> None:
    """Returns when the engine has made this many tokens more, and one at least for every request under way."""
    enough = pair.engine.tokens_generated() + tokens
    await asyncio.sleep(0)  # requests begin
    while pair.engine.tokens_generated() < enough or not all(
        one.tokens for one in pair.engine.requests.running.values()
    ):
        assert pair.engine.requests.running, "every response ended before its time"
        await asyncio.sleep(0.001)


async def through_three_loads(versions: Versions, in_flight: InFlight) -> tuple[Made, Made, list[LoadReport]]:
    """Long responses that begin before each of three versions comes, and short ones after it."""
    pair = versions.pair
    long, short, reports = [], [], []
    for samples in (24, 4, 4):
        long += [(prompt, task) for prompt in PROMPTS[2:] for task in begun(pair, prompt, LONG, samples)]
        await tokens_later(pair, 100)
        reports.append(await versions.load(in_flight))
        short += [(prompt, task) for prompt in PROMPTS for task in begun(pair, prompt, SHORT, 2)]
    return [(p, await task) for p, task in long], [(p, await task) for p, task in short], reports


def check_ends(made: Made, limit: int) -> None:
    """Every response is whole: it ends with the end token or at the limit, and nowhere else."""
    for _, one in made:
        assert len(one.token_ids) == len(one.logprobs) == len(one.versions)
        assert END not in one.token_ids[:-1]
        assert (one.finish_reason == "stop") == (one.token_ids[-1] == END)
        assert len(one.token_ids) == limit or (one.finish_reason == "stop" and len(one.token_ids) < limit)
        assert (np.diff(one.versions) >= 0).all()


@pytest.mark.parametrize("in_flight", ["recompute", "abort"])
def test_every_token_is_of_its_version(versions: Versions, in_flight: InFlight) -> None:
    """Alone catches a token that is told under another version than that of the weights that made it."""
    first = versions.pair.version
    long, short, reports = versions.pair.run(through_three_loads(versions, in_flight))
    check_ends(long, LONG.max_new_tokens)
    check_ends(short, SHORT.max_new_tokens)
    spans = [len(set(one.versions.tolist())) for _, one in long]
    assert max(spans) == LOADS + 1, "no response was under way through all three loads"
    for prompt, one in long + short:
        assert versions.gaps(prompt, one).max() < TOLERANCE_NATS
    resumed = [one.resumed for _, one in long]
    assert resumed == ([span - 1 for span in spans] if in_flight == "abort" else [0] * len(long))
    # The reports agree with the responses: those in flight at a load, and their tokens up to then.
    for load, report in enumerate(reports):
        before = [int((one.versions <= first + load).sum()) for _, one in long + short]
        crossed = [n for n, (_, one) in zip(before, long + short, strict=True) if 0 < n < len(one.token_ids)]
        if in_flight == "abort":
            assert len(crossed) == report.requests_in_flight
            assert sum(crossed) == report.tokens_kept
        else:  # a token may still be on its way when it is counted
            assert len(crossed) >= report.requests_in_flight
            assert sum(crossed) >= report.tokens_kept
        assert report.requests_in_flight > 0
        assert report.pause_seconds > 0
        assert report.drain_seconds == 0


def test_a_response_begins_under_the_version_it_was_admitted_for(versions: Versions) -> None:
    """Alone catches a request that overtakes the weights it is to wait for, as calls of an actor may."""
    pair = versions.pair
    coming = pair.version + 1

    async def asked_too_early() -> list[Generation]:
        calls = [
            asyncio.create_task(pair.engine.generate(PROMPT, SHORT, 0, "p", sample, oldest_version=coming))
            for sample in range(3)
        ]
        await pair.engine.generate(PROMPT, SHORT, 0, "p", 0, oldest_version=coming - 1)
        assert not any(call.done() for call in calls)
        await versions.load("recompute")
        return await asyncio.wait_for(asyncio.gather(*calls), PATIENCE_SECONDS)

    for one in pair.run(asked_too_early()):
        assert set(one.versions.tolist()) == {coming}
        assert versions.gaps(PROMPT, one).max() < TOLERANCE_NATS


def test_who_was_admitted_for_an_older_version_is_served_first(versions: Versions) -> None:
    """Alone catches responses that the trainer waits for behind newer ones, when there are more than run at once."""
    pair = versions.pair
    more_than_run_at_once = pair.engine.arguments["max_num_seqs"] + 16
    ended: list[str] = []

    async def respond(name: str, oldest_version: int) -> None:
        await pair.engine.generate(PROMPT, SHORT, 0, name, 0, oldest_version)
        ended.append(name)

    async def all_at_once() -> None:
        await versions.load("recompute")
        await pair.engine.pause()
        newer = [asyncio.create_task(respond(f"new{i}", pair.version)) for i in range(more_than_run_at_once)]
        while len(pair.engine.requests.running) < more_than_run_at_once:
            await asyncio.sleep(0.01)
        older = [asyncio.create_task(respond(f"old{i}", pair.version - 1)) for i in range(4)]
        while len(pair.engine.requests.running) < more_than_run_at_once + len(older):
            await asyncio.sleep(0.01)
        await pair.engine.resume()
        await asyncio.gather(*newer, *older)

    pair.run(all_at_once())
    assert not [name for name in ended[-12:] if name.startswith("old")], ended


@pytest.mark.parametrize("in_flight", ["recompute", "keep_cache", "drain", "abort"])
def test_the_proof_is_of_the_new_weights(versions: Versions, in_flight: InFlight) -> None:
    """Alone catches scores of given tokens from old weights or an old cache, with responses under way."""
    pair, given = versions.pair, np.arange(7, 19, dtype=np.int32)

    async def do() -> tuple[list[Generation], LoadReport]:
        calls = begun(pair, PROMPT, Sampling(max_new_tokens=60), 8)
        await tokens_later(pair, 20)
        report = await versions.load(in_flight, [(np.asarray(PROMPT, np.int32), given), (given, given)])
        return [await call for call in calls], report

    responses, report = pair.run(do())
    for prompt, scored in zip((PROMPT, given.tolist()), report.scored, strict=True):
        made = dataclasses.replace(responses[0], token_ids=given)
        assert np.abs(reference_logprobs(pair.model, prompt, made, 1.0) - scored).max() < TOLERANCE_NATS


def test_drained_responses_have_one_version(versions: Versions) -> None:
    """Alone catches a response that begins while the engine drains."""
    first = versions.pair.version
    long, short, reports = versions.pair.run(through_three_loads(versions, "drain"))
    check_ends(long, LONG.max_new_tokens)
    check_ends(short, SHORT.max_new_tokens)
    for prompt, one in long + short:
        assert len(set(one.versions.tolist())) == 1
        assert one.resumed == 0
        assert versions.gaps(prompt, one).max() < TOLERANCE_NATS
    assert {one.versions[0] for _, one in long} == {first, first + 1, first + 2}
    assert [(report.requests_in_flight, report.tokens_kept) for report in reports] == [(0, 0)] * LOADS
    assert reports[0].drain_seconds > reports[0].pause_seconds > 0


def test_kept_keys_and_values_stay_with_the_requests_they_are_of(versions: Versions) -> None:
    """Alone catches old keys and values that a new request finds in the cache."""
    long, short, reports = versions.pair.run(through_three_loads(versions, "keep_cache"))
    check_ends(long, LONG.max_new_tokens)
    check_ends(short, SHORT.max_new_tokens)
    gaps_after = []
    for prompt, one in long:
        gaps, before = versions.gaps(prompt, one), one.versions == one.versions[0]
        assert gaps[before].max() < TOLERANCE_NATS
        gaps_after += gaps[~before].tolist()
        assert one.resumed == 0
    assert np.mean(gaps_after) > 0.01, "old keys and values were made anew"
    for prompt, one in short:  # the prompts are those of the long responses, whose old blocks are still there
        own = one.versions == one.versions[0]
        assert versions.gaps(prompt, one)[own].max() < TOLERANCE_NATS
    assert all(report.requests_in_flight > 0 for report in reports)


@pytest.mark.parametrize("in_flight", ["recompute", "keep_cache", "abort"])
def test_what_waited_in_a_paused_engine_meets_nothing_old(versions: Versions, in_flight: InFlight) -> None:
    """Alone catches requests that a pause kept from beginning and that begin under old weights after it."""

    async def load_while_paused() -> tuple[list[Generation], float]:
        pair = versions.pair
        await asyncio.gather(*begun(pair, PROMPT, SHORT, 1))  # its blocks are in the cache
        long = begun(pair, PROMPT, LONG, 8)
        await tokens_later(pair, 40)
        await pair.engine.pause()
        before, paused_before = pair.engine.tokens_generated(), pair.engine.paused_seconds()
        waiting = begun(pair, PROMPT, SHORT, 8)
        await asyncio.sleep(0.1)
        await versions.load(in_flight)
        await asyncio.sleep(0.3)
        assert pair.engine.tokens_generated() == before
        await pair.engine.resume()
        paused = pair.engine.paused_seconds() - paused_before
        assert all(one.token_ids.size > 0 for one in await asyncio.gather(*long))
        return await asyncio.gather(*waiting), paused

    made, paused = versions.pair.run(load_while_paused())
    for one in made:
        assert (one.versions == versions.pair.version).all()
        assert versions.gaps(PROMPT, one).max() < TOLERANCE_NATS
    assert paused > 0.4


def test_a_drained_engine_begins_nothing_until_weights_have_come(versions: Versions) -> None:
    """Alone catches a drained engine that goes on before its weights, or counts its wait as work."""
    pair, first = versions.pair, versions.pair.version

    async def drained() -> tuple[list[Generation], list[Generation], LoadReport]:
        long = begun(pair, PROMPT, LONG, 8)
        await tokens_later(pair, 40)
        await pair.engine.drain()
        assert all(task.done() or not pair.engine.requests.running for task in long)
        made, paused = pair.engine.tokens_generated(), pair.engine.paused_seconds()
        waiting = begun(pair, PROMPT, SHORT, 8)
        await pair.engine.drain()  # again, as when a sync is tried again
        await asyncio.sleep(0.3)
        assert pair.engine.tokens_generated() == made
        assert pair.engine.paused_seconds() - paused > 0.29, "what waits is not standing still"
        report = await versions.load("drain")
        paused = pair.engine.paused_seconds()
        await asyncio.sleep(0.1)
        assert pair.engine.paused_seconds() == paused
        return await asyncio.gather(*long), await asyncio.gather(*waiting), report

    long, waiting, report = pair.run(drained())
    assert all((one.versions == first).all() for one in long)
    assert all((one.versions == first + 1).all() for one in waiting)
    assert report.drain_seconds > 0 and report.requests_in_flight == 0
    again = pair.run(versions.load("drain"))
    assert again.drain_seconds < report.drain_seconds, "that was of the version before"
    assert pair.gap(pair.generate(SHORT), 1.0) < TOLERANCE_NATS


def test_a_paused_engine_cannot_drain(versions: Versions) -> None:
    """Alone catches a pause that waits for itself for ever."""
    pair = versions.pair
    update = versions.publisher.publish(pair.version + 1, published_tensors(pair.model))
    pair.run(pair.engine.pause())
    with pytest.raises(ValueError, match=r"schedule\.in_flight"):
        pair.run(pair.engine.load_weights(pair.version + 1, update, "drain"))
    pair.run(pair.engine.resume())
    assert pair.gap(pair.generate(SHORT), 1.0) < TOLERANCE_NATS  # nothing was loaded


def test_a_stop_string_across_a_cut_ends_the_response(versions: Versions) -> None:
    """Alone catches a stop string that is missed where a response was cut and continued."""
    pair, stop = versions.pair, tuple(f"{digit} w0" for digit in range(3))
    sampling = Sampling(max_new_tokens=64, stop=stop)

    async def cut() -> list[Generation]:
        tasks = begun(pair, PROMPT, sampling, 96)
        await tokens_later(pair, 96 * 2)
        await versions.load("abort")
        return await asyncio.gather(*tasks)

    made = pair.run(cut())
    across = 0
    for one in made:
        words = [f"w{token:03d}" for token in one.token_ids if token > END]  # 0 and 1 are special, and no text
        assert not any(s in " ".join(words[:-1]) for s in stop)
        assert (one.finish_reason == "stop") == (END in one.token_ids or any(s in " ".join(words) for s in stop))
        ended_by_string = END not in one.token_ids and one.finish_reason == "stop"
        across += bool(one.resumed and ended_by_string and one.versions[-2] != one.versions[-1])
        assert versions.gaps(PROMPT, one).max() < TOLERANCE_NATS
    assert across > 0, "no stop string lay across the cut"


def test_aborted_by_the_caller_a_response_does_not_go_on(versions: Versions) -> None:
    """Alone catches a response that is taken up again though the caller ended it."""

    async def abort_then_load() -> list[Generation]:
        pair = versions.pair
        tasks = begun(pair, PROMPT, LONG, 8)
        await tokens_later(pair, 40)
        await pair.engine.abort()
        made = await asyncio.gather(*tasks)
        await versions.load("abort")
        return made

    made = versions.pair.run(abort_then_load())
    aborted = [one for one in made if one.finish_reason == "abort"]
    assert aborted and all(one.resumed == 0 for one in made)
    for one in aborted:
        assert 0 < len(one.token_ids) == len(one.logprobs) == len(one.versions) < LONG.max_new_tokens


def test_a_cancelled_request_leaves_the_engine(versions: Versions) -> None:
    """Alone catches tokens that are still made for a request that nobody waits for."""

    async def cancel() -> tuple[int, int]:
        pair = versions.pair
        tasks = begun(pair, PROMPT, LONG, 8)
        await tokens_later(pair, 40)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while pair.engine._llm.output_processor.has_unfinished_requests():
            await asyncio.sleep(0.01)
        before = pair.engine.tokens_generated()
        await asyncio.sleep(0.3)
        return before, pair.engine.tokens_generated()

    before, after = versions.pair.run(cancel())
    assert before == after


async def slept(pair: Pair) -> tuple[list[Generation], Generation, int]:
    """Long responses with a sleep in their midst, one that was asked during it, and the tokens made during it."""
    engine = pair.engine
    under_way = await pair.begin(PROMPTS[2], Sampling(max_new_tokens=300), 8)
    await engine.sleep()
    assert not all(task.done() for task in under_way), "nothing was under way"
    before, paused = engine.tokens_generated(), engine.paused_seconds()
    asked = asyncio.create_task(engine.generate(PROMPTS[2], Sampling(max_new_tokens=4), 0, "asked", 0))
    await asyncio.sleep(SLEEP_SECONDS)
    assert not asked.done()
    made = engine.tokens_generated() - before
    assert engine.paused_seconds() - paused >= SLEEP_SECONDS
    await engine.wake()
    return [await task for task in under_way], await asked, made


def test_a_sleeping_engine_keeps_what_it_was_asked(plain_pair: Pair) -> None:
    """Alone catches responses that a sleep cuts, spoils or does not stop."""
    long, asked, made_in_sleep = plain_pair.run(slept(plain_pair))
    assert made_in_sleep == 0
    assert len(asked.token_ids) == 4 or asked.finish_reason == "stop"
    for one in [*long, asked]:
        assert one.finish_reason in ("stop", "length")
        gap = reference_logprobs(plain_pair.model, PROMPTS[2], one, 1.0) - one.logprobs
        assert np.abs(gap).max() < TOLERANCE_NATS
