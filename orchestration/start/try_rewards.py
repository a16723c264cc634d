"""Score a made-up response to a row of the job, so that a dry run finds a reward that cannot score."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from configs.blocks.rl import Reward
from configs.reading.load import ConfigError
from plugins.kinds import find
from plugins.marks import needs_a_server
from records.rollout import Group, Prompt, Trajectory
from rewards.scoring.service import ScoringService

RESPONSES = 2  # a reward of a whole group may compare its members


def try_rewards(reward: Reward, prompt: Prompt) -> Iterator[str]:
    """Call each part of the reward once, in a scoring process, and yield which ones were not called.

    Raises:
        ConfigError: a part raised or gave no number; with the row, the response and the error.
    """
    parts = []
    for index, part in enumerate(reward.parts):
        if needs_a_server(find("reward", part.function)):
            yield f"reward.parts.{index}: {part.function} asks a server, so it was not tried"
        else:
            parts.append(part)
    if not parts:
        return
    group = asyncio.run(_scored(reward.model_copy(update={"parts": parts, "workers": 1}), prompt))
    for trajectory in group.trajectories:
        if trajectory.reward_error is not None:
            raise ConfigError(
                f"reward: it cannot score a made-up response to prompt {prompt.prompt_id}, {trajectory.response!r}: "
                f"{trajectory.reward_error}\nA reward must give a number for any response. Correct it, or the row; mark "
                "a function that asks a server with plugins.marks.asks_a_server, and it is not tried here"
            )


async def _scored(reward: Reward, prompt: Prompt) -> Group:
    response = f"{prompt.answer}\n```python\npass\n```\n"
    service = ScoringService(reward)
    await service.start()
    try:
        group = Group("made-up", prompt, [Trajectory.example(prompt, response) for _ in range(RESPONSES)])
        for trajectory in group.trajectories:
            await service.score(trajectory)
        return await service.score_group(group)
    finally:
        await service.close()
