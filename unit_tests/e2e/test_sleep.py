"""A real engine that sleeps: nothing is generated, what was under way goes on after it wakes, as if nothing had been."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rollouts.response import Generation
from rollouts.sampling import Sampling
from unit_tests.e2e.engine_pair import PROMPTS, Pair, reference_logprobs

pytestmark = [pytest.mark.e2e]
TOLERANCE_NATS = 1e-3
SLEEP_SECONDS = 0.5


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
    long, asked, made_in_sleep = plain_pair.run(slept(plain_pair))
    assert made_in_sleep == 0
    assert len(asked.token_ids) == 4 or asked.finish_reason == "stop"
    for one in [*long, asked]:
        assert one.finish_reason in ("stop", "length")
        gap = reference_logprobs(plain_pair.model, PROMPTS[2], one, 1.0) - one.logprobs
        assert np.abs(gap).max() < TOLERANCE_NATS
