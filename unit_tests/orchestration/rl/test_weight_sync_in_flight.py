"""What engines and trainer are both asked to score after a sync in flight."""

from __future__ import annotations

import numpy as np
import pytest

from orchestration.rl.weight_sync_in_flight import probe_tokens
from records.rollout import Prompt, Trajectory


def trajectory(group: str, prompt: int, actions: list[bool]) -> Trajectory:
    length = len(actions)
    return Trajectory(
        Prompt(group, []), group, 0, np.arange(100, 100 + prompt, dtype=np.int32),
        token_ids=np.arange(length, dtype=np.int32), behavior_logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32), is_action=np.asarray(actions, np.bool_), turn=np.zeros(length, np.int32),
    )  # fmt: skip


def test_groups_differ_and_an_observation_ends_the_tokens() -> None:
    made = [
        trajectory("a", 5, [True] * 6),
        trajectory("a", 5, [True] * 6),
        trajectory("b", 5, [True, True, False, True]),
        trajectory("c", 5, []),
        trajectory("d", 5, [True]),
    ]
    chosen = probe_tokens(made, count=4, tokens=4, longest=100)
    assert sorted(t.group_id for t in chosen) == ["a", "b", "d"], "one of a group, and none without tokens"
    assert {t.group_id: t.token_ids.tolist() for t in chosen} == {"a": [0, 1, 2, 3], "b": [0, 1], "d": [0]}
    assert len(probe_tokens(made, count=2, tokens=4, longest=100)) == 2


@pytest.mark.parametrize(("longest", "prompt"), [(7, [100, 101, 102, 103, 104]), (6, [101, 102, 103, 104]), (3, [104])])
def test_what_an_engine_could_not_hold_loses_its_beginning(longest: int, prompt: list[int]) -> None:
    (cut,) = probe_tokens([trajectory("a", 5, [True] * 2)], count=1, tokens=8, longest=longest)
    assert cut.prompt_ids.tolist() == prompt
    assert cut.token_ids.tolist() == [0, 1]
