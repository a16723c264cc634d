"""A rollout worker: one engine, its environments and its scoring processes, in one Ray actor.

All responses of a step run at once (continuous batching, no barrier), each scored as soon as it is finished. Nothing
but finished groups goes back to the driver.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from configs.schema import Model, Reward
from data_feeds.chat import load_tokenizer, render_chat
from rewards.service import ScoringService
from rollouts.engine import Generation, VLLMEngine
from rollouts.environment import find_environment
from rollouts.records import Group, Prompt, Trajectory
from rollouts.sampling import Sampling


@dataclass(frozen=True)
class Asking:
    """One prompt to be asked, and how often."""

    group_id: str
    prompt: Prompt
    samples: int
    first_sample: int = 0  # for seeds: samples that earlier askings of the prompt in the same step took


@dataclass(frozen=True)
class Finished:
    """What a worker gives back for a step: its groups, and where the time went."""

    groups: list[Group]
    generate_seconds: float  # until the last token
    reward_seconds: float  # from the last token to the last score


@dataclass(frozen=True)
class _Turn:
    """One generation, and what the environment said to it (nothing after the last)."""

    made: Generation
    text: str
    observation: list[int]


class RolloutWorker:
    """Owns one engine. Methods are asynchronous, so that weights can be pushed while responses are being generated."""

    def __init__(self, engine: VLLMEngine, model: Model, reward: Reward, environment: str) -> None:
        self.engine = engine
        self.tokenizer = load_tokenizer(model.path, model.trust_remote_code)
        self.environment_class = find_environment(environment)
        self.scoring = ScoringService(reward)

    async def start(self) -> None:
        """Load the model and the rewards; what does not load raises here."""
        await asyncio.gather(self.engine.start(), self.scoring.start())

    async def generate(self, askings: list[Asking], sampling: Sampling, step: int) -> Finished:
        """Sample and score every response of every asking, all at once."""
        started = time.monotonic()
        self._last_token = started
        groups = await asyncio.gather(*(self._group(asking, sampling, step) for asking in askings))
        return Finished(
            groups=list(groups),
            generate_seconds=self._last_token - started,
            reward_seconds=time.monotonic() - self._last_token,
        )

    async def probe(self, prompts: list[Prompt], sampling: Sampling, step: int) -> list[Trajectory]:
        """Short unscored continuations under the weights of this moment, for comparison with the trainer."""
        askings = [Asking(f"probe-{i}", prompt, 1) for i, prompt in enumerate(prompts)]
        calls = (self._trajectory(asking, self._prompt_ids(asking.prompt), 0, sampling, step) for asking in askings)
        return list(await asyncio.gather(*calls))

    async def _group(self, asking: Asking, sampling: Sampling, step: int) -> Group:
        prompt_ids = self._prompt_ids(asking.prompt)

        async def scored(sample: int) -> Trajectory:
            trajectory = await self._trajectory(asking, prompt_ids, sample, sampling, step)
            self._last_token = max(self._last_token, time.monotonic())
            return trajectory if trajectory.reward is not None else await self.scoring.score(trajectory)

        trajectories = await asyncio.gather(*(scored(sample) for sample in range(asking.samples)))
        return await self.scoring.score_group(Group(asking.group_id, asking.prompt, list(trajectories)))

    def _prompt_ids(self, prompt: Prompt) -> np.ndarray:
        return np.asarray(render_chat(self.tokenizer, prompt.messages), dtype=np.int32)

    async def _trajectory(
        self, asking: Asking, prompt_ids: np.ndarray, sample: int, sampling: Sampling, step: int
    ) -> Trajectory:
        environment = self.environment_class()
        environment.reset(asking.prompt)
        context = prompt_ids.tolist()
        turns: list[_Turn] = []
        seconds = 0.0
        while True:
            made = await self.engine.generate(
                context,
                sampling,
                step=step,
                prompt_id=f"{asking.prompt.prompt_id}#{len(turns)}",
                sample=asking.first_sample + sample,
            )
            seconds += made.seconds
            text = self.tokenizer.decode(made.token_ids, skip_special_tokens=True)
            answer = environment.step(text, made.token_ids.tolist())
            turns.append(_Turn(made, text, [] if answer.done else list(answer.token_ids or ())))
            if answer.done or made.finish_reason != "stop":
                break
            if answer.token_ids is None:
                raise ValueError(f"{type(environment).__name__}: an observation must be given as token_ids")
            context += [*made.token_ids.tolist(), *turns[-1].observation]
        trajectory = _joined(asking, sample, prompt_ids, turns, seconds)
        if answer.reward is not None:
            trajectory.reward, trajectory.reward_parts = answer.reward, {"environment": answer.reward}
        return trajectory

    async def load_weights(self, version: int, update: dict[str, Any]) -> None:
        await self.engine.load_weights(version, update)

    async def close(self) -> None:
        await self.scoring.close()
        await self.engine.shutdown()


def _joined(asking: Asking, sample: int, prompt_ids: np.ndarray, turns: list[_Turn], seconds: float) -> Trajectory:
    """One trajectory of all turns: what was generated is trained on, what was observed is context."""
    ids, logprobs, versions, actions, numbers = [], [], [], [], []
    for number, turn in enumerate(turns):
        observed = len(turn.observation)
        last_version = turn.made.versions[-1:] if len(turn.made.versions) else np.zeros(1, dtype=np.int32)
        ids += [turn.made.token_ids, np.asarray(turn.observation, dtype=np.int32)]
        logprobs += [turn.made.logprobs, np.zeros(observed, dtype=np.float32)]
        versions += [turn.made.versions, np.repeat(last_version, observed)]
        actions += [np.ones(len(turn.made.token_ids), dtype=np.bool_), np.zeros(observed, dtype=np.bool_)]
        numbers.append(np.full(len(turn.made.token_ids) + observed, number, dtype=np.int32))
    return Trajectory(
        prompt=asking.prompt,
        group_id=asking.group_id,
        sample=sample,
        prompt_ids=prompt_ids,
        token_ids=np.concatenate(ids),
        behavior_logprobs=np.concatenate(logprobs),
        versions=np.concatenate(versions),
        is_action=np.concatenate(actions),
        turn=np.concatenate(numbers),
        response="\n".join(turn.text for turn in turns),
        finish_reason=turns[-1].made.finish_reason,
        generate_seconds=seconds,
    )
