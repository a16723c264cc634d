"""The rollout worker with a scripted engine: groups, turns and scores, without vLLM."""

import asyncio

import numpy as np
import pytest

from configs.schema import Model, Reward
from rollouts.engine import Generation
from rollouts.environment import Step
from rollouts.records import Prompt
from rollouts.sampling import Sampling
from rollouts.worker import Asking, RolloutWorker
from unit_tests.tiny_model import write_tiny_model


class ScriptedEngine:
    """Answers with the number of the sample, repeated; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], str, int]] = []

    async def start(self) -> None:
        pass

    async def generate(self, prompt_ids, sampling, step, prompt_id, sample):
        self.asked.append((list(prompt_ids), prompt_id, sample))
        await asyncio.sleep(0.001 * (5 - sample % 5))  # later samples finish first
        n = sample + 1
        return Generation(
            np.full(n, 3 + sample, np.int32), np.full(n, -0.5, np.float32), np.full(n, 4, np.int32), "stop", 0.01
        )

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


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return Model(path=str(folder))


def generate(model, environment, samples):
    async def run():
        engine = ScriptedEngine()
        worker = RolloutWorker(engine, model, Reward.model_validate({"parts": [{"function": "ended"}]}), environment)
        await worker.start()
        prompts = [Prompt(f"p{i}", [{"role": "user", "content": f"question {i}"}]) for i in range(2)]
        askings = [Asking(f"g{i}", prompt, samples) for i, prompt in enumerate(prompts)]
        finished = await worker.generate(askings, Sampling(max_new_tokens=8), step=1)
        await worker.close()
        return engine, finished

    return asyncio.run(run())


def test_groups_come_back_whole_in_order_and_scored(model):
    engine, finished = generate(model, "single_turn", samples=4)
    assert [g.group_id for g in finished.groups] == ["g0", "g1"]
    for group in finished.groups:
        assert [t.sample for t in group.trajectories] == [0, 1, 2, 3]
        assert [t.action_tokens for t in group.trajectories] == [1, 2, 3, 4]
        assert all(t.reward == 1.0 and t.reward_parts == {"ended": 1.0} for t in group.trajectories)
        assert all((t.versions == 4).all() and (t.behavior_logprobs == -0.5).all() for t in group.trajectories)
    assert len(engine.asked) == 8
    assert finished.generate_seconds > 0
    assert finished.reward_seconds >= 0


def test_turns_are_joined_token_in_token_out(model):
    engine, finished = generate(model, "unit_tests.rollouts.test_worker:ThreeTurns", samples=2)
    trajectory = finished.groups[0].trajectories[1]
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


def test_a_prompt_asked_again_is_seeded_as_further_samples(model):
    async def run():
        engine = ScriptedEngine()
        worker = RolloutWorker(engine, model, Reward.model_validate({"parts": [{"function": "ended"}]}), "single_turn")
        await worker.start()
        prompt = Prompt("p0", [{"role": "user", "content": "question"}])
        await worker.generate(
            [Asking("g0", prompt, 2), Asking("g1", prompt, 2, first_sample=2)], Sampling(max_new_tokens=8), step=1
        )
        await worker.close()
        return engine

    assert sorted(asked[2] for asked in asyncio.run(run()).asked) == [0, 1, 2, 3]
