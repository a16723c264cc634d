"""The replay buffer: how long, how many, the same ones again, and with nothing of the record changed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from records.rollout import Group, Prompt, Trajectory
from rollouts.replay_buffer import ReplayBuffer


def a_group(name: str, version: int = 0, dropped_by: str | None = None) -> Group:
    prompt = Prompt(name, [])
    trajectory = Trajectory(
        prompt, name, 0, np.array([1], np.int32), np.array([2, 3], np.int32), np.array([-0.5, -0.25], np.float32),
        np.full(2, version, np.int32), np.ones(2, np.bool_), np.zeros(2, np.int32), reward=1.0, dropped_by=dropped_by,
    )  # fmt: skip
    return Group(name, prompt, [trajectory])


def names(groups: list[Group]) -> list[str]:
    return [group.group_id for group in groups]


def test_a_group_is_reused_until_it_is_too_old() -> None:
    buffer = ReplayBuffer(max_age_versions=2, groups_per_batch=1, seed=0)
    assert buffer.take(5) == []
    buffer.add([a_group("a")], 5)
    assert names(buffer.take(6)) == ["a"]
    assert names(buffer.take(7)) == ["a"]
    assert buffer.take(8) == []
    assert buffer.state == []


def test_what_filters_left_out_is_not_reused() -> None:
    buffer = ReplayBuffer(max_age_versions=1, groups_per_batch=1, seed=0)
    buffer.add([a_group("a", dropped_by="overlong")], 0)
    assert buffer.take(1) == []


def test_records_come_back_as_they_were_sampled() -> None:
    buffer = ReplayBuffer(max_age_versions=3, groups_per_batch=1, seed=0)
    group = a_group("a", version=4)
    buffer.add([group], 5)
    (back,) = buffer.take(7)
    assert back is group
    assert back.trajectories[0].versions.tolist() == [4, 4]
    assert back.trajectories[0].behavior_logprobs.tolist() == [-0.5, -0.25]


@given(seed=st.integers(0, 1000), steps=st.lists(st.integers(0, 6), max_size=8), max_age_versions=st.integers(1, 3))
def test_any_run_draws_without_replacement_in_time_and_the_same_after_a_resume(seed, steps, max_age_versions) -> None:
    buffer, resumed = (ReplayBuffer(max_age_versions, 3, seed) for _ in range(2))
    for version, fresh in enumerate(steps):
        resumed.load_state(buffer.state)
        taken = buffer.take(version)
        assert len(set(names(taken))) == len(taken) == min(3, sum(steps[max(0, version - max_age_versions) : version]))
        assert all(1 <= version - int(name.split("-")[0]) <= max_age_versions for name in names(taken))
        assert names(resumed.take(version)) == names(taken)
        buffer.add([a_group(f"{version}-{i}") for i in range(fresh)], version)


def test_the_draw_changes_with_version_and_seed() -> None:
    draws = set()
    for seed in (0, 1):
        buffer = ReplayBuffer(10, 10, seed)
        buffer.add([a_group(str(i)) for i in range(100)], 0)
        draws |= {tuple(names(buffer.take(version))) for version in (1, 2)}
    assert len(draws) == 4
