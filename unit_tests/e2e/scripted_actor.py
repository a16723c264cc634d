"""A rollout actor without vLLM, tokenizer and scoring processes: its process, its calls and its heartbeat are real.

Its engine answers at a chosen pace and starts as it is told. A process of it starts in a third of the time of a real one's.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from configs.blocks.rl import Model, Reward
from orchestration.cluster.heartbeat import Activity
from orchestration.cluster.processes import lead_own_group
from orchestration.engines.actor import RolloutActor
from records.rollout import Group, Trajectory
from rollouts import worker
from rollouts.vllm.engine import LoadReport, WeightLoadError
from rollouts.vllm.load_stamp import LoadStamp
from rollouts.vllm.response import Generation
from rollouts.worker import GroupRequest, RolloutWorker

TOKENS = 4
SLOW_SECONDS = 8.0


class SlowEngine:
    """Tokens tell the prompt's length and the version."""

    def __init__(self, starts: str, log_file: str) -> None:
        """starts: what becomes of one start after the other, a letter each: c fails in construction, h hangs, f fails, s takes
        SLOW_SECONDS; what follows succeeds at once."""
        self.seconds_per_token = 0.05
        self.starts, self.log = starts, Path(log_file)
        self.version, self.tokens, self.refusal = 0, 0, ""

    async def start(self) -> None:
        if not self.starts:
            return
        with self.log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        number = len(self.log.read_text().splitlines())
        outcome = self.starts[number - 1 : number]
        if outcome == "h":
            await asyncio.sleep(1000)
        if outcome == "s":
            await asyncio.sleep(SLOW_SECONDS)
        if outcome == "f":
            raise ValueError("there is no such model")

    def death(self) -> None:
        return None

    def paused_seconds(self) -> float:
        return 0.0

    def tokens_generated(self) -> int:
        return self.tokens

    async def generate(self, prompt_ids, sampling, step, prompt_id, sample, oldest_version) -> Generation:
        versions = []
        for _ in range(TOKENS):
            await asyncio.sleep(self.seconds_per_token)
            if self.refusal:
                raise WeightLoadError(self.refusal)
            self.tokens += 1
            versions.append(self.version)
        ids = np.full(TOKENS, len(prompt_ids), np.int32)
        return Generation(ids, np.zeros(TOKENS, np.float32), np.asarray(versions, np.int32), "stop", 0.1)

    async def load_weights(self, version: int, update: dict[str, Any], in_flight: str, to_score: Any) -> LoadReport:
        self.refusal = update.get("refusal", "")
        if self.refusal:
            raise WeightLoadError(self.refusal)
        self.version = version
        return LoadReport(0.0, 0.0, 0, 0)

    async def shutdown(self) -> None:
        self.log.with_suffix(".closed").touch()


class WordTokenizer:
    """Every word is a token."""

    chat_template = "the contents, one after the other"

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> list[int]:
        return [len(word) for message in messages for word in message["content"].split()]

    def decode(self, token_ids: Any, **_: Any) -> str:
        return " ".join(map(str, token_ids))


class SameReward:
    """Scores every response with 1, in no process of its own."""

    async def start(self) -> None: ...

    async def score(self, trajectory: Trajectory) -> Trajectory:
        trajectory.reward = 1.0
        return trajectory

    async def score_group(self, group: Group) -> Group:
        return group

    async def close(self) -> None: ...


class ScriptedActor(RolloutActor):
    """Constructed with what the driver's handle gives: the log file first."""

    def __init__(self, log_file: str, starts: str = "") -> None:
        lead_own_group()
        log = Path(log_file)
        earlier = len(log.read_text().splitlines()) if log.exists() else 0
        if starts[earlier : earlier + 1] == "c":
            with log.open("a") as file:
                file.write("not constructed\n")
            raise OSError(28, "No space left on device")
        self._pulse, self._duty, self._loaded = Activity(), "", LoadStamp()
        self._moved, self._moves, self._is_started = (0, 0, 0, 0.0), 0, False
        self._still_since = time.monotonic()
        self.late: dict[str, float] = {}
        worker.load_tokenizer = lambda *_: WordTokenizer()  # type: ignore[assignment]
        reward = Reward.model_validate({"parts": [{"function": "ended"}]})
        RolloutWorker.__init__(self, SlowEngine(starts, log_file), Model(path="none"), reward, "single_turn")
        self.scoring = SameReward()

    async def submit(self, requests: list[GroupRequest]) -> None:
        await asyncio.sleep(self.late.get("submit", 0.0))
        await super().submit(requests)

    async def cancel(self, group_ids: list[str]) -> None:
        await asyncio.sleep(self.late.get("cancel", 0.0))
        await super().cancel(group_ids)

    async def be_late(self, **seconds: float) -> None:
        """Have calls of these names overtaken by others from now on, as Ray may."""
        self.late = seconds

    async def generate_at(self, seconds_per_token: float) -> None:
        """Take this long for a token from now on."""
        self.engine.seconds_per_token = seconds_per_token

    async def process(self) -> int:
        return os.getpid()

    async def version(self) -> int:
        return self.engine.version
