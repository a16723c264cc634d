"""Rewards of a whole group: what they see, what is added, and what becomes of their failures."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.blocks.rl import Reward
from plugins.kinds import find
from plugins.marks import is_of_group
from plugins.parameters import check
from records.rollout import Group, Prompt, Trajectory
from rewards.relative_length import relative_length
from rewards.scoring.service import NOT_SCORED_AS_GROUP, ScoringService


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def member(response: str, tokens: int = 1, reward: float | None = None) -> Trajectory:
    ids = np.zeros(tokens, np.int32)
    return Trajectory(
        Prompt("p/0", [], "4"), "g", 0, ids, ids, np.zeros(tokens, np.float32), ids, np.ones(tokens, bool), ids,
        response=response, reward=reward,
    )  # fmt: skip


def scored(parts: list[dict[str, Any]], *responses: str, **settings: Any) -> list[Trajectory]:
    async def run() -> list[Trajectory]:
        settings["first_timeout_seconds"] = settings.get("timeout_seconds", 10)
        service = ScoringService(Reward(parts=parts, **settings))  # type: ignore[arg-type]
        await service.start()
        try:
            members = await asyncio.gather(*(service.score(member(r)) for r in responses))
            assert all(t.reward_error for t in members), "not paid yet, and nobody may think so"
            assert any(t.reward_error == NOT_SCORED_AS_GROUP for t in members)
            group = await service.score_group(Group("g", members[0].prompt, list(members)))
            again = [(t.reward, t.reward_error) for t in (await service.score_group(group)).trajectories]
            assert again == [(t.reward, t.reward_error) for t in members]
            return group.trajectories
        finally:
            await service.close()

    return asyncio.run(run())


def test_a_group_part_sees_what_was_paid_and_adds_to_it() -> None:
    parts = [{"function": "last_number", "weight": 10.0}, {"function": "hostile_rewards:rank", "weight": 0.5}]
    done = scored(parts, "3", "4", "5")
    assert [t.reward for t in done] == [0.0, 11.0, 0.0]
    assert done[1].reward_parts == {"last_number": 1.0, "rank/place": 2.0} and done[1].reward_error is None


def test_members_that_failed_before_stay_as_they_are() -> None:
    parts = [{"function": "hostile_rewards:by_response"}, {"function": "hostile_rewards:rank"}]
    failed, good = scored(parts, "fail", "good")
    assert failed.reward is None and "KeyError" in (failed.reward_error or "") and failed.reward_parts == {}
    assert good.reward == 0.5 and good.reward_parts == {"by_response": 0.5, "rank/place": 0.0}


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("short", "it must return a list of 3, one per member"),
        ("number", "it returned '1.0'; it must return a list"),
        ("text", "it is str, not a number"),
        ("fail", "KeyError: 'the column nobody has'"),
        ("hang", "no answer within 1 s"),
        ("die", "exit code 3"),
    ],
)
def test_a_failing_group_part_is_an_error_of_every_member(first: str, said: str) -> None:
    parts = [{"function": "ended"}, {"function": "hostile_rewards:by_first_response"}]
    for t in scored(parts, first, "b", "c", timeout_seconds=1.0):
        assert t.reward is None and said in (t.reward_error or "") and t.reward_parts["ended"] == 0.0


def test_a_part_may_fail_for_some_members() -> None:
    one, text, nan = scored([{"function": "hostile_rewards:by_first_response"}], "part", "b", "c", on_error="zero")
    assert (one.reward, one.reward_error) == (1.0, None)
    assert text.reward == 0.0 and "not a number" in (text.reward_error or "")
    assert nan.reward == 0.0 and "it returned by_first_response = nan" in (nan.reward_error or "")


def test_relative_length() -> None:
    def paid(*members: tuple[int, float | None]) -> list[float]:
        return relative_length(Group("g", Prompt("p", []), [member("", n, reward) for n, reward in members]))

    # by hand: shortest 10, longest 30
    assert paid((10, 1.0), (20, 1.0), (30, 1.0), (15, 0.0), (25, 0.0)) == [0.5, 0.0, -0.5, 0.0, -0.25]
    assert paid((10, 1.0), (10, 0.0)) == [0.0, 0.0]
    assert paid((10, None), (20, None)) == [0.0, 0.0]
    assert paid((5, None), (10, 1.0), (20, 1.0))[1:] == [0.5, -0.5], "one that could not be scored sets no length"


def test_group_parts_are_found_and_checked_as_others() -> None:
    assert is_of_group(find("reward", "relative_length")) and not is_of_group(find("reward", "length"))
    with pytest.raises(ValueError, match="did you mean right_at"):
        check("reward", "relative_length", {"right": 1})
