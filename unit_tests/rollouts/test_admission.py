"""Admission: bounded staleness without waste and without deadlock, in small cases by hand and in random ones."""

from __future__ import annotations

import copy
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollouts.admission import Admission


def ask(admission: Admission, version: int, names: str) -> None:
    for name in names:
        admission.submitted(name, version)


def finish(admission: Admission, names: str) -> None:
    for name in names:
        admission.finished(name)


def test_sync_asks_one_batch_and_takes_it_whole_in_order_of_asking() -> None:
    admission = Admission(batch_groups=3, max_staleness=0)
    assert admission.room(0) == 3
    ask(admission, 0, "abc")
    finish(admission, "cb")
    assert admission.batch(0) is None
    finish(admission, "a")
    assert admission.batch(0) == ["a", "b", "c"]
    assert admission.room(0) == 0, "nothing is asked while the batch is trained on"
    assert admission.room(1) == 3


def test_sync_goes_on_at_the_same_version_when_nothing_was_trained() -> None:
    admission = Admission(batch_groups=2, max_staleness=0)
    ask(admission, 0, "ab")
    finish(admission, "ab")
    assert admission.batch(0) == ["a", "b"]
    admission.trained(0)
    assert admission.room(0) == 2
    ask(admission, 0, "cd")
    finish(admission, "cd")
    assert admission.batch(0) == ["c", "d"]


def test_a_filtered_group_frees_its_place_and_fewer_are_taken_when_no_more_are_asked() -> None:
    admission = Admission(batch_groups=3, max_staleness=0)
    ask(admission, 0, "abc")
    finish(admission, "abc")
    admission.cancelled("b")
    assert admission.room(0) == 1
    assert admission.batch(0) is None
    assert admission.batch(0, count=2) == ["a", "c"]
    admission.trained(1)
    assert admission.batch(1, count=0) == []


def test_overlap_asks_one_batch_ahead_while_training_and_waits_for_stragglers() -> None:
    admission = Admission(batch_groups=2, max_staleness=1)
    assert admission.room(0) == 4
    ask(admission, 0, "abcd")
    finish(admission, "db")
    assert admission.batch(0) == ["b", "d"]
    assert admission.room(0) == 0, "two of version 0 are out already, and only version 1 may still train on them"
    assert admission.room(1) == 2
    ask(admission, 1, "ef")
    finish(admission, "ea")
    assert admission.batch(1) is None, "c must be in this batch: at version 2 it would be two versions old"
    finish(admission, "c")
    assert admission.batch(1) == ["a", "c"]
    assert (admission.ready, admission.running) == (1, 1)


def test_an_order_that_leaves_too_many_of_one_deadline_waits() -> None:
    """Four groups of deadline 2 fit into the batches of versions 1 and 2 only when two of them are in that of version 1."""
    admission = Admission(batch_groups=2, max_staleness=2)
    ask(admission, 0, "abcdef")
    finish(admission, "ab")
    assert admission.batch(0) == ["a", "b"]
    ask(admission, 1, "gh")
    finish(admission, "gh")
    assert admission.batch(1) is None
    finish(admission, "f")
    assert admission.batch(1) is None
    finish(admission, "d")
    assert admission.batch(1) == ["d", "f"]


def test_who_is_content_with_fewer_gets_all_that_is_finished() -> None:
    admission = Admission(batch_groups=3, max_staleness=1)
    ask(admission, 0, "abcde")
    finish(admission, "bd")
    assert admission.batch(0, count=0) == ["b", "d"]
    assert admission.batch(1, count=0) is None, "a, c and e must be in this batch"
    finish(admission, "ace")
    assert admission.batch(1, count=0) == ["a", "c", "e"]


@pytest.mark.parametrize(
    ("max_staleness", "over_issue", "most"), [(0, None, 20), (0, 0.5, 20), (3, None, 80), (3, 0.15, 23), (1, 2.0, 40)]
)
def test_over_issue_bounds_what_is_outstanding(max_staleness: int, over_issue: float | None, most: int) -> None:
    assert Admission(20, max_staleness, over_issue).room(0) == most


def test_what_cannot_be_is_refused() -> None:
    admission = Admission(batch_groups=1, max_staleness=1)
    ask(admission, 1, "a")
    with pytest.raises(AssertionError, match="submitted twice"):
        ask(admission, 1, "a")
    with pytest.raises(AssertionError, match="versions fell"):
        ask(admission, 0, "b")
    ask(admission, 1, "b")
    with pytest.raises(AssertionError, match="no room"):
        ask(admission, 1, "c")
    finish(admission, "a")
    with pytest.raises(AssertionError, match="not running"):
        finish(admission, "a")
    assert admission.batch(1) == ["a"]
    with pytest.raises(AssertionError, match="at 2, not 1"):
        admission.batch(1)


class World:
    """Engines that finish in any order, filters that leave out anything, a trainer that sometimes changes nothing."""

    def __init__(self, batch: int, staleness: int, over_issue: float | None, seed: int) -> None:
        self.admission = Admission(batch, staleness, over_issue)
        self.batch_groups, self.staleness = batch, staleness
        self.bound = (1 + min(staleness, staleness if over_issue is None else over_issue)) * batch + 0.5
        self.version, self.training, self.random = 0, False, random.Random(seed)
        self.asked_at: dict[str, int] = {}
        self.running: list[str] = []
        self.ready: list[str] = []

    def ask(self, share: float) -> None:
        for _ in range(round(share * self.admission.room(self.version))):
            name = str(len(self.asked_at))
            self.admission.submitted(name, self.version)
            self.asked_at[name] = self.version
            self.running.append(name)

    def finish(self, share: float) -> None:
        for name in self.random.sample(self.running, round(share * len(self.running))):
            self.running.remove(name)
            self.ready.append(name)
            self.admission.finished(name)

    def cancel(self) -> None:
        name = self.random.choice(self.running + self.ready)
        self.admission.cancelled(name)
        (self.running if name in self.running else self.ready).remove(name)

    def take(self, count: int | None) -> None:
        wanted = self.batch_groups if count is None else count
        first = sorted(self.ready, key=int)[: self.batch_groups]
        is_due = len(first) >= wanted and self.all_in_time_without(first)
        taken = self.admission.batch(self.version, count)
        assert taken == (first if is_due else None)
        for name in taken or ():
            assert self.version - self.asked_at[name] <= self.staleness, "trained on too late"
            self.ready.remove(name)
        self.training = taken is not None

    def all_in_time_without(self, taken: list[str]) -> bool:
        """Whether the other groups still make it, played through: batches in order of asking, a version each."""
        left = sorted({*self.running, *self.ready} - {*taken}, key=int)
        version = self.version
        while left:
            version += 1
            if any(version - self.asked_at[name] > self.staleness for name in left[: self.batch_groups]):
                return False
            left = left[self.batch_groups :]
        return True

    def trained(self, changed: bool) -> None:
        self.version += changed
        self.admission.trained(self.version)
        self.training = False


class AnyOrder(RuleBasedStateMachine):
    """Anything that may happen to a World, in any order; what must hold after each of it."""

    @initialize(
        batch=st.integers(1, 4),
        staleness=st.sampled_from([0, 1, 2, 3, 5]),
        over_issue=st.none() | st.floats(0, 5),
        seed=st.integers(0, 9),
    )
    def start(self, batch: int, staleness: int, over_issue: float | None, seed: int) -> None:
        self.world = World(batch, staleness, over_issue, seed)

    @rule(share=st.floats(0, 1))
    def ask(self, share: float) -> None:
        self.world.ask(share)

    @rule(share=st.floats(0, 1))
    def finish(self, share: float) -> None:
        self.world.finish(share)

    @precondition(lambda self: self.world.admission.outstanding)
    @rule()
    def cancel(self) -> None:
        self.world.cancel()

    @precondition(lambda self: not self.world.training)
    @rule()
    def take(self) -> None:
        self.world.take(None)

    @precondition(lambda self: not self.world.training)
    @rule(count=st.integers(0, 4))
    def take_fewer(self, count: int) -> None:
        self.world.take(min(count, self.world.batch_groups))

    @precondition(lambda self: not self.world.training and not self.world.running)
    @rule()
    def take_what_is_there(self) -> None:
        self.world.take(min(len(self.world.ready), self.world.batch_groups))
        assert self.world.training, "with nothing running, what is there can always be taken"

    @precondition(lambda self: self.world.training)
    @rule(changed=st.booleans())
    def trained(self, changed: bool) -> None:
        self.world.trained(changed)

    @precondition(lambda self: not self.world.training)
    @rule(finished=st.floats(0, 1))
    def go_on_for_a_step(self, finished: float) -> None:
        self.world.ask(1.0)
        self.world.finish(finished)
        self.world.take(None)
        if self.world.training:
            self.world.trained(changed=True)

    @invariant()
    def nothing_is_lost_and_the_bound_holds(self) -> None:
        world, admission = self.world, self.world.admission
        assert (admission.running, admission.ready) == (len(world.running), len(world.ready))
        assert admission.outstanding == len(world.running) + len(world.ready) <= world.bound

    @invariant()
    def never_a_deadlock(self) -> None:
        """When all that runs finishes and the room is used, batches come for ever, and nothing stays behind."""
        world = copy.deepcopy(self.world)
        if world.training:
            world.trained(changed=True)
        held = {*world.running, *world.ready}
        for _ in range(world.staleness + 2):
            world.ask(1.0)
            world.finish(1.0)
            world.take(None)
            assert world.training, "a deadlock"
            world.trained(changed=True)
        assert not held & {*world.running, *world.ready}, "a finished group was never trained on"


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
