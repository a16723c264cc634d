"""Laps over engines' counters: what is left out, and an engine that begins anew."""

from __future__ import annotations

import pytest

from orchestration.engines.utilisation import EngineUtilisation
from rollouts.worker import EngineCounters


def counters(busy: float, paused: float = 0.0, tokens: int = 0) -> EngineCounters:
    return EngineCounters(tokens, busy_seconds=busy, scoring_seconds=0.0, paused_seconds=paused)


def test_seconds_are_means_over_engines_and_tokens_are_sums() -> None:
    times = EngineUtilisation()
    times.take_in([counters(2.0, tokens=10), counters(4.0, tokens=30)])
    lap = times.lap()
    assert (lap.busy_seconds, lap.tokens_generated) == (3.0, 40)
    times.take_in([counters(3.0, tokens=11), counters(4.0, tokens=30)])
    lap = times.lap()
    assert (lap.busy_seconds, lap.tokens_generated) == (0.5, 1)


def test_what_is_not_counted_is_in_no_lap() -> None:
    times = EngineUtilisation()
    times.take_in([counters(1.0)])
    times.take_in([counters(6.0)], is_counted=False)
    times.take_in([counters(8.0)])
    assert times.lap().busy_seconds == 3.0


def test_an_engine_begun_anew_counts_from_nought() -> None:
    times = EngineUtilisation()
    times.take_in([counters(5.0), None])
    times.take_in([counters(1.0), counters(2.0)])
    assert times.lap().busy_seconds == pytest.approx(2.5 + 1.5)


def test_the_idle_rest_of_a_step() -> None:
    times = EngineUtilisation()
    times.take_in([counters(1.0, paused=0.5)])
    means = times.lap().tally(4.0).means()
    assert means == {
        "schedule/engine_busy_share": 0.25, "schedule/engine_busy_seconds": 1.0, "schedule/engine_paused_seconds": 0.5,
        "schedule/engine_idle_seconds": 2.5,
    }  # fmt: skip


def test_seconds_that_come_late_are_in_the_sum_over_a_run() -> None:
    """An engine busy all of two steps of 2 s; at the end of the first it had told of 0.5 s."""
    times, rows = EngineUtilisation(), []
    for busy in (0.5, 4.0):
        times.take_in([counters(busy)])
        rows.append(times.lap().tally(2.0).means())
    assert sum(row["schedule/engine_busy_seconds"] for row in rows) == 4.0
    assert sum(row["schedule/engine_idle_seconds"] for row in rows) == 0.0
    assert [row["schedule/engine_busy_share"] for row in rows] == [0.25, 1.0]
