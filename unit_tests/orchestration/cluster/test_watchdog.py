"""Who is to blame when the driver waits too long, and what actors say of themselves."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from orchestration.cluster.heartbeat import IDLE, Activity, Heartbeat
from orchestration.cluster.watchdog import POLL_SECONDS, Member, TrainerLost, heartbeat_seconds, standing_still

LIMIT = 60.0


def member(name: str, still: float = 0.0, silent: float | None = None, phase: str = "backward") -> Member:
    one = Member(name, actor=None, lost=TrainerLost)
    one.heartbeat = Heartbeat(phase, still, 7, pid=4242, node="n", host="here")
    if silent is not None:
        one._question, one._asked_at = object(), time.monotonic() - silent
    return one


@pytest.mark.parametrize(
    ("states", "waited", "blamed"),
    [
        ([("a", 5), ("b", 59)], 100, []),
        ([("a", 5), ("b", 61)], 100, ["b"]),
        ([("a", 61), ("b", 62)], 100, ["a", "b"]),  # they wait for one another
        ([("a", 600)], 10, []),  # it had nothing to do before it was waited for
        ([("a", 63), ("b", 0, 61)], 100, ["b"]),  # a waits for b, which is frozen
        ([("a", 63), ("b", 0, 59)], 100, []),  # in a moment it will be b's turn, not a's
        ([("a", 63), ("b", 0, 3)], 100, ["a"]),  # b is only slow to answer
    ],
)
def test_who_is_blamed(states: list[tuple[Any, ...]], waited: float, blamed: list[str]) -> None:
    """states: name, seconds still, seconds silent; made here, since silence is counted from now."""
    members = [member(*state) for state in states]
    assert [m.name for m in standing_still(members, waited, LIMIT)] == blamed


@pytest.mark.parametrize("limit", [5.0, 6.0, 10.0, 600.0, 7200.0])
def test_who_waits_for_a_frozen_one_is_not_blamed_however_short_the_time_out_is(limit: float) -> None:
    """The question that stays unanswered is asked one beat after it froze at the latest, and looked for now and then."""
    silent = limit - heartbeat_seconds(limit) - POLL_SECONDS
    assert standing_still([member("waits", limit + 0.1), member("frozen", 0, silent)], 10 * limit, limit) == []


def test_what_is_said_of_them() -> None:
    assert member("rank 0", 60.4, phase="optimizer step").state() == (
        "rank 0 (pid 4242 on here) has been in 'optimizer step' for 60 s"
    )
    assert member("rank 1", silent=61, phase="backward").state() == (
        "rank 1 (pid 4242 on here) has not answered for 61 s; before that it was in 'backward'"
    )
    assert Member("rank 2", None, TrainerLost).state() == "rank 2 has never answered"


def test_a_pulse_is_read_by_another_thread_while_its_own_is_busy() -> None:
    activity, may_end, found = Activity(), threading.Event(), []

    def work() -> None:
        with activity.during("step 1"):
            for i in range(3):
                activity.enter(f"micro-batch {i}")
            may_end.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    while "2" not in activity._state[0]:
        time.sleep(0.01)
    time.sleep(0.2)
    found.append(activity._state)
    may_end.set()
    thread.join()
    phase, since, count = found[0]
    assert (phase, count) == ("micro-batch 2", 4)
    assert time.monotonic() - since >= 0.2
    assert activity._state[0] == IDLE
    assert activity._state[2] == 5


def test_a_phase_ends_also_by_an_error() -> None:
    activity = Activity()
    with pytest.raises(ValueError), activity.during("write"):
        raise ValueError
    assert activity._state[0] == IDLE


def test_every_thing_that_passes_is_a_movement() -> None:
    activity = Activity()
    activity.enter("publish")
    assert list(activity.moved_by(iter("abc"))) == ["a", "b", "c"]
    assert activity._state[0] == "publish"
    assert activity._state[2] == 4
