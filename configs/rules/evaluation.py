"""Rules on rewards, and on an evaluation on its own."""

from __future__ import annotations

from collections.abc import Iterator

from configs.blocks.evaluation import EvalConfig
from configs.blocks.rl import Reward
from configs.rules.passed_through import engine_length_problems, engine_problems
from configs.rules.problem import Problem


def eval_problems(config: EvalConfig) -> Iterator[Problem]:
    """Yield what is wrong with the evaluation."""
    yield from reward_problems(config.reward)
    yield from engine_problems("engine", config.engine)
    longest = config.data.max_prompt_tokens + config.eval.max_new_tokens
    yield from engine_length_problems("engine", config.engine, longest, "eval.max_new_tokens")


def reward_problems(reward: Reward) -> Iterator[Problem]:
    """Yield a complaint when no part of the reward counts."""
    if all(part.weight == 0 for part in reward.parts):
        yield "reward.parts", "every weight is 0, so every reward is 0; give a part a weight"


def reward_warnings(reward: Reward) -> Iterator[str]:
    """Yield a warning when no response can pass."""
    most = sum(part.weight for part in reward.parts if part.weight > 0)
    if most < reward.pass_threshold:
        yield (
            f"reward.pass_threshold: {reward.pass_threshold:g} is above the sum of the positive weights {most:g}; "
            "parts that pay 0 to 1 can never pass"
        )
