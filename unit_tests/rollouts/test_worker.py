"""The rollout worker with a scripted engine: groups, turns and scores, without vLLM."""

import asyncio
import time

import numpy as np
import pytest

from configs.blocks.rl import Model, Reward
from records.rollout import Prompt
from rollouts.environment import Step
from rollouts.vllm.response import Generation
from rollouts.vllm.sampling import Sampling
from rollouts.worker import GroupRequest, RolloutWorker
from unit_tests.tiny_model import write_tiny_model


class ScriptedEngine:
    """Answers with the number of the sample, repeated; remembers what it was asked, and what was cancelled."""

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.asked: list[tuple[list[int], str, int]] = []
        self.seconds = seconds or {}  # that a response takes, by prompt id
        self.cancelled: list[tuple[str, int]] = []
        self.tokens = 0
        self.pause = 0.0

    async def start(self) -> None:
        pass

    async def generate(self, prompt_ids, sampling, step, prompt_id, sample, oldest_version=0):
        self.asked.append((list(prompt_ids), prompt_id, sample))
        # Later samples finish first.
        seconds = self.seconds.get(prompt_id.split("#")[0], 0.001 * (5 - sample % 5))
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled.append((prompt_id, sample))
            raise
        n = sample + 1
        self.tokens += n
        return Generation(
            np.full(n, 3 + sample, np.int32), np.full(n, -0.5, np.float32), np.full(n, 4, np.int32), "stop", 0.01
        )

    def tokens_generated(self) -> int:
        return self.tokens

    def paused_seconds(self) -> float:
        return self.pause

    async def shutdown(self) -> None:
        pass


class ThreeTurns:
    """Says [1, 2] twice, then ends with a reward of its own."""

    def __init__(self) -> None:
        self.turns = 0

    def reset(self, prompt):
        return prompt.messages

    def step(self, response, token_ids):
        self.turns += 1
        if self.turns == 3:
            return Step(done=True, reward=0.25)
        return Step(done=False, token_ids=[1, 2])


class BreaksOnP1(ThreeTurns):
    def reset(self, prompt):
        if prompt.prompt_id == "p1":
            raise KeyError("no such world")
        return prompt.messages


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return Model(path=str(folder))


SAMPLING = Sampling(max_new_tokens=8)


def requests_for(groups, samples, step=1):
    prompts = [Prompt(f"p{i}", [{"role": "user", "content": f"question {i}"}]) for i in range(groups)]
    return [GroupRequest(f"g{i}", prompt, samples, SAMPLING, step) for i, prompt in enumerate(prompts)]


def with_worker(model, do, engine=None, environment="single_turn"):
    """What `do` returns, given a started worker."""

    async def run():
        reward = Reward.model_validate({"parts": [{"function": "ended"}]})
        worker = RolloutWorker(engine or ScriptedEngine(), model, reward, environment)
        await worker.start()
        try:
            return await do(worker)
        finally:
            await worker.close()

    return asyncio.run(run())


async def made(worker, requests):
    """The groups of these askings, in their order; others that come meanwhile are dropped."""
    await worker.submit(requests)
    ids, groups = [request.group_id for request in requests], {}
    while not groups.keys() >= set(ids):
        groups |= {group.group_id: group for group in (await worker.collect(10))[0]}
    return [groups[name] for name in ids]


def generate(model, environment, samples):
    """The engine, and two groups."""

    async def do(worker):
        return worker.engine, await made(worker, requests_for(2, samples))

    return with_worker(model, do, environment=environment)


def test_groups_come_back_whole_and_scored(model):
    engine, groups = generate(model, "single_turn", samples=4)
    for group in groups:
        assert [t.sample for t in group.trajectories] == [0, 1, 2, 3]
        assert [t.action_tokens for t in group.trajectories] == [1, 2, 3, 4]
        assert all(t.reward == 1.0 and t.reward_parts == {"ended": 1.0} for t in group.trajectories)
        assert all((t.versions == 4).all() and (t.behavior_logprobs == -0.5).all() for t in group.trajectories)
    assert len(engine.asked) == 8


def test_turns_are_joined_token_in_token_out(model):
    engine, groups = generate(model, "unit_tests.rollouts.test_worker:ThreeTurns", samples=2)
    trajectory = groups[0].trajectories[1]
    assert trajectory.token_ids.tolist() == [4, 4, 1, 2, 4, 4, 1, 2, 4, 4]
    assert trajectory.is_action.tolist() == [True, True, False, False] * 2 + [True, True]
    assert trajectory.turn.tolist() == [0] * 4 + [1] * 4 + [2] * 2
    assert (trajectory.behavior_logprobs[~trajectory.is_action] == 0).all()
    assert trajectory.reward == 0.25
    contexts = [asked[0] for asked in engine.asked if asked[1].startswith("p0") and asked[2] == 1]
    prompt = trajectory.prompt_ids.tolist()
    assert contexts == [prompt, [*prompt, 4, 4, 1, 2], [*prompt, 4, 4, 1, 2, 4, 4, 1, 2]]
    ids = {asked[1] for asked in engine.asked if asked[1].startswith("p0")}
    assert len(ids) == 3, "every turn of a seeded rollout needs a seed of its own"


def test_no_environment_hears_of_a_probe(model):
    """Here one that breaks on the second prompt, and asks for further turns on the others."""

    async def do(worker):
        prompts = [request.prompt for request in requests_for(3, 1)]
        found = await worker.probe(prompts, SAMPLING, step=1)
        return worker.engine, found, (await worker.collect(0.0))[1]

    engine, found, counters = with_worker(model, do, environment="unit_tests.rollouts.test_worker:BreaksOnP1")
    assert [t.prompt.prompt_id for t in found] == ["p0", "p1", "p2"]
    assert [t.prompt_ids.tolist() for t in found] == [asked[0] for asked in engine.asked]
    for t in found:
        assert t.token_ids.tolist() == [3] and t.is_action.all() and t.versions.tolist() == [4]
        assert t.behavior_logprobs.tolist() == [-0.5] and t.finish_reason == "stop"
    assert counters.tokens_generated == 0 < engine.tokens


def test_a_prompt_asked_again_is_seeded_as_further_samples(model):
    async def do(worker):
        prompt = Prompt("p0", [{"role": "user", "content": "question"}])
        await made(
            worker,
            [GroupRequest("g0", prompt, 2, SAMPLING, 1), GroupRequest("g1", prompt, 2, SAMPLING, 1, first_sample=2)],
        )
        return worker.engine

    assert sorted(asked[2] for asked in with_worker(model, do).asked) == [0, 1, 2, 3]


async def collected(worker, count):
    """Group ids in the order they came, over as many calls as it takes."""
    ids = []
    while len(ids) < count:
        ids += [group.group_id for group in (await worker.collect(10))[0]]
    return ids


def test_what_was_asked_is_collected_once_in_order_of_finishing(model):
    async def do(worker):
        await worker.submit(requests_for(3, 2))
        assert not worker._ended, "it does not wait for the first"
        ids = await collected(worker, 3)
        rest, _ = await worker.collect(0.0)
        return worker.engine, ids, rest

    engine, ids, rest = with_worker(model, do, ScriptedEngine({"p0": 0.6, "p1": 0.3, "p2": 0.0}))
    assert ids == ["g2", "g1", "g0"]
    assert rest == []
    order = [(prompt, sample) for _, prompt, sample in engine.asked]
    assert order == [(f"p{i}#0", sample) for i in range(3) for sample in range(2)]  # begun in the order of asking


def test_collect_returns_all_there_are_and_waits_only_for_the_first(model):
    async def do(worker):
        await worker.submit(requests_for(3, 1))
        while len(worker._ended) < 2:
            await asyncio.sleep(0.01)
        began = time.monotonic()
        groups = (await worker.collect(30))[0]
        return [group.group_id for group in groups], time.monotonic() - began

    ids, seconds = with_worker(model, do, ScriptedEngine({"p0": 0.0, "p1": 0.1, "p2": 60.0}))
    assert sorted(ids) == ["g0", "g1"]
    assert seconds < 20, "it waited for the third"


def test_collect_waits_no_longer_than_told_and_counts_meanwhile(model):
    async def do(worker):
        await worker.submit(requests_for(2, 3))
        began = time.monotonic()
        groups, first = await worker.collect(0.3)
        assert groups == []
        seconds = time.monotonic() - began
        await asyncio.sleep(0.2)
        worker.engine.pause += 0.1  # the engine stood still for a part of the time
        return seconds, first, (await worker.collect(0.0))[1], time.monotonic() - began

    seconds, first, then, in_all = with_worker(model, do, ScriptedEngine({"p0": 60.0, "p1": 60.0}))
    assert 0.3 <= seconds < 30, "it waited for a response"
    assert 0.29 < first.busy_seconds <= seconds
    assert first.busy_seconds + 0.09 < then.busy_seconds <= in_all - 0.1, "the pause does not count"
    assert then.paused_seconds == 0.1


def test_counters_of_finished_work(model):
    async def do(worker):
        await worker.submit(requests_for(2, 3))
        await collected(worker, 2)
        _, first = await worker.collect(0.0)
        await asyncio.sleep(0.1)
        return first, (await worker.collect(0.0))[1]

    first, then = with_worker(model, do)
    assert first.tokens_generated == 2 * (1 + 2 + 3)
    assert (first.busy_seconds, first.scoring_seconds) == (then.busy_seconds, then.scoring_seconds)
    assert first.busy_seconds > 0
    assert first.scoring_seconds > 0


def test_an_error_in_a_group_is_raised_once_and_the_others_come_all_the_same(model):
    async def do(worker):
        await worker.submit(requests_for(3, 2))
        with pytest.raises(KeyError, match="no such world") as caught:
            await worker.collect(10)
        return caught.value.__notes__, await collected(worker, 2)

    notes, ids = with_worker(model, do, environment="unit_tests.rollouts.test_worker:BreaksOnP1")
    assert notes == ["in group g1, prompt p1"]
    assert sorted(ids) == ["g0", "g2"]


def test_the_other_responses_of_a_broken_group_end(model):
    class BreaksOnSample1(ScriptedEngine):
        async def generate(self, prompt_ids, sampling, step, prompt_id, sample, oldest_version):
            if sample == 1:
                raise OSError("the engine is gone")
            return await super().generate(prompt_ids, sampling, step, prompt_id, sample, oldest_version)

    async def do(worker):
        await worker.submit(requests_for(1, 3))
        with pytest.raises(OSError, match="the engine is gone"):
            await worker.collect(10)
        return worker.engine, (worker._responses.running, worker._groups.running)

    engine, running = with_worker(model, do, BreaksOnSample1({"p0": 60.0}))
    assert engine.cancelled == [("p0#0", 0), ("p0#0", 2)]
    assert running == (0, 0)


def test_cancelled_groups_end_and_never_come(model):
    async def do(worker):
        await worker.submit(requests_for(3, 2))
        while not worker._ended:  # g0 is not collected
            await asyncio.sleep(0.01)
        await worker.cancel(["g0", "g1", "unknown"])
        groups, _ = await worker.collect(0.0)
        assert groups == [] and worker._groups.running == 1
        await worker.submit(requests_for(1, 2, step=2))  # g0 again
        return worker.engine, await collected(worker, 2)

    engine, ids = with_worker(model, do, ScriptedEngine({"p0": 0.0, "p1": 60.0, "p2": 2.0}))
    assert engine.cancelled == [("p1#0", 0), ("p1#0", 1)]
    assert ids == ["g0", "g2"]


def test_closing_ends_what_is_under_way(model):
    async def do(worker):
        await worker.submit(requests_for(1, 2))
        while len(worker.engine.asked) < 2:
            await asyncio.sleep(0.01)
        return worker.engine

    assert len(with_worker(model, do, ScriptedEngine({"p0": 60.0})).cancelled) == 2


def test_what_is_asked_later_runs_beside_what_was_asked(model):
    """As an evaluation does in overlap."""

    async def do(worker):
        await worker.submit(requests_for(1, 2))
        (group,) = await made(
            worker, [GroupRequest("e0", Prompt("q0", [{"role": "user", "content": "question"}]), 1, SAMPLING, 1)]
        )
        return group, worker._responses.running

    group, running = with_worker(model, do, ScriptedEngine({"p0": 60.0}))
    assert group.group_id == "e0"
    assert running == 2
