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
from rollouts.engine import VLLMEngine
from rollouts.environment import Environment, find_environment
from rollouts.records import Group, Prompt, Trajectory
from rollouts.sampling import Sampling


@dataclass(frozen=True)
class Asking:
    """One prompt to be asked, and how often."""

    group_id: str
    prompt: Prompt
    samples: int


@dataclass(frozen=True)
class Finished:
    """What a worker gives back for a step: its groups, and where the time went."""

    groups: list[Group]
    generate_seconds: float  # until the last token
    reward_seconds: float  # from the last token to the last score


class RolloutWorker:
    """Owns one engine. Methods are asynchronous, so that weights can be pushed while responses are being generated."""

    def __init__(self, engine: VLLMEngine, model: Model, reward: Reward, environment: str) -> None:
        self.engine = engine
        self.tokenizer = load_tokenizer(model.path, model.trust_remote_code)
        self.environment_class = find_environment(environment)
        self.scoring = ScoringService(reward)

    async def start(self) -> None:
        """Begin to accept work; a reward that does not import raises here."""
        await self.scoring.start()

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
            return await self.scoring.score(trajectory)

        trajectories = await asyncio.gather(*(scored(sample) for sample in range(asking.samples)))
        return Group(asking.group_id, asking.prompt, list(trajectories))

    def _prompt_ids(self, prompt: Prompt) -> np.ndarray:
        return np.asarray(render_chat(self.tokenizer, prompt.messages), dtype=np.int32)

    async def _trajectory(
        self, asking: Asking, prompt_ids: np.ndarray, sample: int, sampling: Sampling, step: int
    ) -> Trajectory:
        environment: Environment = self.environment_class()
        environment.reset(asking.prompt)
        made = await self.engine.generate(
            prompt_ids.tolist(), sampling, step=step, prompt_id=asking.prompt.prompt_id, sample=sample
        )
        response = self.tokenizer.decode(made.token_ids, skip_special_tokens=True)
        environment.step(response, made.token_ids)
        tokens = len(made.token_ids)
        return Trajectory(
            prompt=asking.prompt,
            group_id=asking.group_id,
            sample=sample,
            prompt_ids=prompt_ids,
            token_ids=made.token_ids,
            behavior_logprobs=made.logprobs,
            versions=made.versions,
            is_action=np.ones(tokens, dtype=np.bool_),
            turn=np.zeros(tokens, dtype=np.int32),
            response=response,
            finish_reason=made.finish_reason,
            generate_seconds=made.seconds,
        )

    async def load_weights(self, version: int, update: dict[str, Any]) -> None:
        await self.engine.load_weights(version, update)

    async def close(self) -> None:
        await self.scoring.close()
        self.engine.shutdown()
