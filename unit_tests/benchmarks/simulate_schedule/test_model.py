"""The schedule's model: exact where lengths are constant, and nothing lost whatever they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulate_schedule.model import Costs, Outcome, Plan, Simulation, Work, log_normal

GENERATE = 1.0  # seconds of 10 tokens in the one slot
COSTS = Costs(0.1, 0.0, 0.0, train_fixed_seconds=0.3, train_token_seconds=0.0, sync_seconds=0.1, pause_seconds=0.0)


def constant(length: int, responses: int):
    return log_normal(length, 0.0, 1000, responses)


ONE_SLOT = Work(batch_groups=1, prompt_tokens=0, draw=constant(10, 1), most_running=1)


def simulate(costs: Costs = COSTS, work: Work = ONE_SLOT, steps: int = 10, seed: int = 0, **plan) -> Outcome:
    return Simulation(costs, work, Plan(**{"generators": 1, "trainers": 1, **plan}), seed).run(steps)


@pytest.mark.parametrize("train", [0.3, 3.0])
def test_sync_takes_the_sum(train: float) -> None:
    found = simulate(replace(COSTS, train_fixed_seconds=train))
    assert found.seconds_per_step == pytest.approx(GENERATE + train + 0.1)
    assert found.trainer_wait_seconds == pytest.approx(GENERATE)
    assert found.engine_idle_seconds == pytest.approx(train + 0.1)
    assert found.tokens_per_second == pytest.approx(10 / found.seconds_per_step)
    assert found.steps_per_hour == pytest.approx(3600 / found.seconds_per_step)
    assert found.staleness == {0: 1.0}


@pytest.mark.parametrize("staleness", [1, 3])
@pytest.mark.parametrize("train", [0.3, 0.9, 3.0])
def test_overlap_takes_the_longer_side(train: float, staleness: int) -> None:
    found = simulate(replace(COSTS, train_fixed_seconds=train), max_staleness=staleness)
    assert found.seconds_per_step == pytest.approx(max(GENERATE, train + 0.1))
    assert found.trainer_wait_seconds == pytest.approx(max(0.0, GENERATE - train - 0.1), abs=1e-9)
    assert found.engine_idle_seconds == pytest.approx(max(0.0, train + 0.1 - GENERATE), abs=1e-9)


def test_a_pause_adds_to_the_engines_side_only() -> None:
    pausing = replace(COSTS, pause_seconds=0.1)
    assert simulate(pausing, max_staleness=1).seconds_per_step == pytest.approx(GENERATE + 0.1)
    assert simulate(pausing, max_staleness=1).engine_paused_seconds == pytest.approx(0.1)
    slow_trainer = replace(pausing, train_fixed_seconds=3.0)
    assert simulate(slow_trainer, max_staleness=1).seconds_per_step == pytest.approx(3.1)


def test_tokens_of_a_response_are_counted_by_the_version_that_made_them() -> None:
    """Each response begins when training does; weights come 0.4 s later, after 4 of its 10 tokens."""
    found = simulate(max_staleness=1)
    assert found.staleness == {0: pytest.approx(0.6), 1: pytest.approx(0.4)}


def test_drain_lets_responses_end_before_the_weights_come() -> None:
    found = simulate(max_staleness=1, in_flight="drain")
    assert found.seconds_per_step == pytest.approx(max(GENERATE, 0.3) + 0.1)
    assert found.staleness == {0: 0.0, 1: pytest.approx(1.0)}
    assert found.trainer_wait_seconds == pytest.approx(GENERATE - 0.3)


def test_shared_devices_take_turns() -> None:
    costs = replace(COSTS, switch_seconds=0.5)
    found = simulate(costs, max_staleness=1, pause_while_training=True)
    assert found.seconds_per_step == pytest.approx(GENERATE + 0.3 + 0.1 + 0.5)
    assert found.engine_paused_seconds == pytest.approx(0.3 + 0.1 + 0.5)


def test_partial_rollouts_do_not_wait_for_the_longest_response() -> None:
    work = Work(batch_groups=8, prompt_tokens=0, draw=log_normal(100, 1.2, 5000, 4))
    sync = simulate(work=work, steps=30)
    partial = simulate(work=work, steps=30, max_staleness=2, pause_while_training=True)
    assert partial.tokens_per_second > 1.3 * sync.tokens_per_second


def test_running_responses_share_an_engine_and_devices_share_the_work() -> None:
    costs = replace(COSTS, decode_token_seconds=0.01, prefill_token_seconds=0.02, train_token_seconds=0.001)
    work = Work(batch_groups=4, prompt_tokens=5, draw=constant(10, 2))
    alone = 4 * 5 * 0.02 + 10 * (0.1 + 8 * 0.01) + 0.3 + 4 * 25 * 0.001 + 0.1
    assert simulate(costs, work).seconds_per_step == pytest.approx(alone)
    spread = 2 * 5 * 0.02 + 10 * (0.1 + 4 * 0.01) + 0.3 + 4 * 25 * 0.001 / 5 + 0.1
    assert simulate(costs, work, generators=2, trainers=5).seconds_per_step == pytest.approx(spread)


def test_recomputing_costs_what_prefilling_costs() -> None:
    costs = replace(COSTS, prefill_token_seconds=0.01)
    keep = simulate(costs, max_staleness=1, in_flight="keep_cache")
    recompute = simulate(costs, max_staleness=1, in_flight="recompute")
    assert keep.seconds_per_step == pytest.approx(GENERATE)
    assert recompute.seconds_per_step == pytest.approx(GENERATE + 4 * 0.01)  # its 4 tokens so far, at each sync


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="pause_seconds is above sync_seconds"):
        simulate(replace(COSTS, pause_seconds=0.2))
    with pytest.raises(ValueError, match="needs max_staleness of at least 1"):
        simulate(pause_while_training=True)


any_plan = st.builds(
    Plan,
    generators=st.integers(1, 3),
    trainers=st.integers(1, 3),
    max_staleness=st.integers(1, 3),
    in_flight=st.sampled_from(["recompute", "keep_cache", "drain", "abort"]),
    over_issue=st.none() | st.floats(0, 3),
    pause_while_training=st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(
    plan=any_plan | st.builds(Plan, generators=st.integers(1, 3), trainers=st.integers(1, 3)),
    batch=st.integers(1, 5),
    most_running=st.integers(1, 8),
    sigma=st.floats(0, 1.5),
    seed=st.integers(0, 99),
)
def test_every_group_is_trained_on_once_and_in_time(
    plan: Plan, batch: int, most_running: int, sigma: float, seed: int
) -> None:
    costs = Costs(0.01, 0.001, 0.0001, 0.2, 0.001, 0.1, 0.05, reward_seconds=0.05, switch_seconds=0.1)
    work = Work(batch, 7, log_normal(20, sigma, 200, 3), most_running)
    steps = 6
    found = Simulation(costs, work, plan, seed).run(steps)
    assert sorted(map(int, found.trained)) == list(range(batch * (steps + 2 * (plan.max_staleness + 2))))
    assert sum(found.staleness.values()) == pytest.approx(1.0)
    assert max(found.staleness) == plan.max_staleness
    assert found == Simulation(costs, work, plan, seed).run(steps), "the same seed gives the same run"
