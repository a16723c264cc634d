"""A rollout worker: one engine, its environments and its scoring processes, in one Ray actor.

All requested responses run at once (continuous batching, no barrier), and each is scored as soon as it is finished.
Only finished groups go back to the driver: `submit` begins them, `collect` returns them.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from configs.blocks.rl import Model, Reward
from data_feeds.chat.template import load_tokenizer, render_chat
from plugins.kinds import find
from records.rollout import Group, Prompt, Trajectory
from rewards.scoring.service import ScoringService
from rollouts.vllm.busy_timer import BusyTimer
from rollouts.vllm.engine import VLLMEngine
from rollouts.vllm.response import Generation
from rollouts.vllm.sampling import Sampling


@dataclass(frozen=True)
class GroupRequest:
    """A request for one group: a prompt, how many responses to it, and how they are sampled."""

    group_id: str
    prompt: Prompt
    samples: int  # responses
    sampling: Sampling
    step: int  # of the loop; a part of every response's seed
    first_sample: int = 0  # for seeds: samples that earlier requests for the prompt took in the same step
    oldest_version: int = 0  # of the policy; an engine that holds an older one waits for its weights


@dataclass(frozen=True)
class EngineCounters:
    """What an engine has done since it started; the numbers only grow."""

    tokens_generated: int  # of requested responses, running ones too; not of probes
    busy_seconds: float  # with a requested response running, and the engine not paused
    scoring_seconds: float  # with no response running but scores outstanding, and the engine not paused
    paused_seconds: float  # in which the engine could not generate: weights came, or it was told to pause or to sleep


@dataclass(frozen=True)
class _Turn:
    """One generation, and the environment's answer to it (empty after the last one)."""

    made: Generation
    text: str
    observation: list[int]


class RolloutWorker:
    """A worker with one engine. Its methods are asynchronous, so weights can be loaded during generation."""

    def __init__(self, engine: VLLMEngine, model: Model, reward: Reward, environment: str) -> None:
        self.engine = engine
        self.tokenizer = load_tokenizer(model.path, model.trust_remote_code)
        self.environment_class = find("environment", environment)
        self.scoring = ScoringService(reward)
        self._responses, self._groups = BusyTimer(self._unpaused_seconds), BusyTimer(self._unpaused_seconds)
        self._under_way: dict[str, asyncio.Task[Group]] = {}  # by group id
        self._tokens_probed = 0
        self._ended: list[str] = []  # group ids, for `collect`
        self._one_ended = asyncio.Event()

    def _unpaused_seconds(self) -> float:
        return time.monotonic() - self.engine.paused_seconds()

    async def start(self) -> None:
        """Load the model and the rewards; raise what keeps them from loading."""
        await asyncio.gather(self.engine.start(), self.scoring.start())

    async def submit(self, requests: list[GroupRequest]) -> None:
        """Begin every response of every request, in this order, and return at once. `collect` returns their groups."""
        for request in requests:
            assert request.group_id not in self._under_way, f"group {request.group_id} is under way already"
            task = asyncio.create_task(self._requested_group(request))
            self._under_way[request.group_id] = task
            task.add_done_callback(partial(self._end, request.group_id))

    async def collect(self, wait_seconds: float) -> tuple[list[Group], EngineCounters]:
        """Return the groups that finished since the last call, in order of finishing, and the counters of this moment.
        Wait at most this long when no group has finished.

        Raise once what a group raised (an environment's own error, WeightLoadError), with a note that names the group;
        the other groups stay for the next call.
        """
        if not self._ended:
            self._one_ended.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._one_ended.wait(), wait_seconds)
        for group_id in self._ended:
            if self._under_way[group_id].exception() is not None:
                self._ended.remove(group_id)
                await self._under_way.pop(group_id)  # raises
        groups = [self._under_way.pop(group_id).result() for group_id in self._ended]
        self._ended.clear()
        return groups, EngineCounters(
            tokens_generated=self.engine.tokens_generated() - self._tokens_probed,
            busy_seconds=self._responses.seconds(),
            scoring_seconds=self._groups.seconds() - self._responses.seconds(),
            paused_seconds=self.engine.paused_seconds(),
        )

    async def cancel(self, group_ids: list[str]) -> None:
        """End these groups' responses; `collect` will return none of them. Unknown ids have no effect."""
        cancelled = {group_id: self._under_way.pop(group_id) for group_id in group_ids if group_id in self._under_way}
        self._ended = [group_id for group_id in self._ended if group_id not in cancelled]
        for task in cancelled.values():
            task.cancel()
        await asyncio.gather(*cancelled.values(), return_exceptions=True)  # nobody wants their results any more

    async def probe(self, prompts: list[Prompt], sampling: Sampling, step: int) -> list[Trajectory]:
        """Return short unscored continuations under the weights of this moment, for comparison with the trainer. They
        are made by the engine alone, without an environment."""

        async def continued(request: GroupRequest) -> Trajectory:
            ids, prompt_id = self._prompt_ids(request.prompt), f"{request.prompt.prompt_id}#0"
            made = await self.engine.generate(ids.tolist(), sampling, step=step, prompt_id=prompt_id, sample=0)
            return _joined(request, 0, ids, [_Turn(made, "", [])], made.seconds)

        requests = [GroupRequest(f"probe-{i}", prompt, 1, sampling, step) for i, prompt in enumerate(prompts)]
        continuations = list(await asyncio.gather(*map(continued, requests)))
        self._tokens_probed += sum(t.action_tokens for t in continuations)
        return continuations

    async def _requested_group(self, request: GroupRequest) -> Group:
        try:
            with self._groups.timing():
                return await self._group(request)
        except Exception as error:
            error.add_note(f"in group {request.group_id}, prompt {request.prompt.prompt_id}")
            raise

    def _end(self, group_id: str, _: asyncio.Task[Group]) -> None:
        if group_id in self._under_way:  # not cancelled
            self._ended.append(group_id)
            self._one_ended.set()

    async def _group(self, request: GroupRequest) -> Group:
        prompt_ids = self._prompt_ids(request.prompt)

        async def scored(sample: int) -> Trajectory:
            with self._responses.timing():
                trajectory = await self._trajectory(request, prompt_ids, sample)
            return trajectory if trajectory.reward is not None else await self.scoring.score(trajectory)

        tasks = [asyncio.create_task(scored(sample)) for sample in range(request.samples)]
        try:
            trajectories = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()  # when one failed, nobody needs the others
        return await self.scoring.score_group(Group(request.group_id, request.prompt, trajectories))

    def _prompt_ids(self, prompt: Prompt) -> np.ndarray:
        return np.asarray(render_chat(self.tokenizer, prompt.messages), dtype=np.int32)

    async def _trajectory(self, request: GroupRequest, prompt_ids: np.ndarray, sample: int) -> Trajectory:
        environment = self.environment_class()
        environment.reset(request.prompt)
        context = prompt_ids.tolist()
        turns: list[_Turn] = []
        seconds = 0.0
        while True:
            made = await self.engine.generate(
                context,
                request.sampling,
                step=request.step,
                prompt_id=f"{request.prompt.prompt_id}#{len(turns)}",
                sample=request.first_sample + sample,
                oldest_version=request.oldest_version,
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
        trajectory = _joined(request, sample, prompt_ids, turns, seconds)
        if answer.reward is not None:
            trajectory.reward, trajectory.reward_parts = answer.reward, {"environment": answer.reward}
        return trajectory

    async def close(self) -> None:
        await self.cancel(list(self._under_way))
        await self.scoring.close()
        await self.engine.shutdown()


def _joined(
    request: GroupRequest, sample: int, prompt_ids: np.ndarray, turns: list[_Turn], seconds: float
) -> Trajectory:
    """Return one trajectory of all turns: generated tokens are trained on, observed ones are only context."""
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
        prompt=request.prompt,
        group_id=request.group_id,
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
