"""The driver's waiting: nothing waits for ever, and who stands still is named.

Every registered actor is asked every few seconds what it is doing (`beat`, answered by a thread of its own or between two
awaits, so that a busy actor answers too). Whoever does not answer, or has not moved, for the time-out while the driver waits
for it is ended and reported as lost.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from orchestration.cluster.heartbeat import Heartbeat
from orchestration.cluster.processes import end_group

R = TypeVar("R")
S = TypeVar("S")

HEARTBEAT_SECONDS = 2.0  # between two questions; less where the time-out is short
POLL_SECONDS = 0.2  # between two looks at what is waited for
DEATH_SECONDS = 10.0  # in which one rank's death is known, or it would have answered, after another complained about it
START_SECONDS = 1800.0  # for an actor to start, or to read its state: large models are read from slow disks
DEATHS = (
    RayActorError,
    OutOfMemoryError,
)  # what Ray raises about an actor that is gone; the latter when Ray itself killed it


class Lost(RuntimeError):
    """A process that the run depends on died or stands still; it has been ended."""

    def __init__(self, name: str, how: str, message: str) -> None:
        super().__init__(message)
        self.name, self.how = name, how  # who, and what happened to it


class TrainerLost(Lost):
    """A trainer rank is gone. What it held is in the last checkpoint."""


class EngineLost(Lost):
    """A rollout engine is gone. It can be replaced."""


class EnginesLost(RuntimeError):
    """Engines died more often than failures.engine_restarts allows; says which, how and how often."""


class Died(RuntimeError):
    """Raised by an actor when a process that works for it has died; says how."""


class Member:
    """A watched actor."""

    def __init__(self, name: str, actor: Any, lost: type[Lost], was_lost: bool = False) -> None:
        self.name, self.actor, self.lost, self.was_lost = name, actor, lost, was_lost
        self.heartbeat: Heartbeat | None = None  # the last one
        self._question: Any = None
        self._asked_at = 0.0
        self._heartbeat_seconds = HEARTBEAT_SECONDS

    def look(self, heartbeat_seconds: float) -> None:
        """Take in an answer, ask again. Raises what the question raised: one of DEATHS, or Died from within the actor."""
        now, self._heartbeat_seconds = time.monotonic(), heartbeat_seconds
        if self._question is not None and ray.wait([self._question], timeout=0)[0]:
            question, self._question = self._question, None
            self.heartbeat = ray.get(question)
        if self._question is None and now - self._asked_at >= heartbeat_seconds:
            self._question, self._asked_at = self.actor.heartbeat.remote(), now

    @property
    def silent_seconds(self) -> float:
        """How long the last question has been unanswered."""
        return 0.0 if self._question is None else time.monotonic() - self._asked_at

    def still_seconds(self, waited_seconds: float) -> float:
        """How long nothing has moved in it, of the time that it was waited for."""
        return 0.0 if self.heartbeat is None else min(self.heartbeat.still_seconds, waited_seconds)

    @property
    def place(self) -> str:
        return self.heartbeat.place if self.heartbeat else "it never answered"

    def state(self) -> str:
        """What it is doing, in words."""
        if self.heartbeat is None:
            return f"{self.name} has never answered"
        if self.silent_seconds > 2 * self._heartbeat_seconds:
            return f"{self.name} ({self.place}) has not answered for {self.silent_seconds:.0f} s; before that it was in '{self.heartbeat.phase}'"
        return (
            f"{self.name} ({self.place}) has been in '{self.heartbeat.phase}' for {self.heartbeat.still_seconds:.0f} s"
        )


@dataclass(frozen=True)
class Call(Generic[R]):
    """Calls of actors that have begun, and what their results mean together."""

    futures: Sequence[Any]
    doing: str  # in words, for messages
    answer: Callable[[list[Any]], R]  # makes one answer of the results, which are in the order of `futures`
    stall_seconds: float | None = None  # the time-out, where it is another than the run's

    def then(self, change: Callable[[R], S]) -> Call[S]:
        """Return the same call with another answer, which is made of this one's."""
        return Call(self.futures, self.doing, lambda results: change(self.answer(results)), self.stall_seconds)


class Watch:
    """All waits of the driver on its actors."""

    def __init__(self, stall_seconds: float) -> None:
        self.stall_seconds = stall_seconds
        self._members: dict[Any, Member] = {}  # by Ray's id of the actor
        self._lost: dict[Any, Lost] = {}  # likewise; for whoever waits for them yet

    def add(self, name: str, actor: Any, lost: type[Lost], was_lost: bool = False) -> Member:
        """Watch an actor with a method `beat() -> Beat`; `lost` is raised when it is lost. was_lost: it is in the place of one that
        was: when it cannot even be constructed it is lost too, where that of a first one is a mistake in what it was told."""
        member = self._members[actor._actor_id] = Member(name, actor, lost, was_lost)
        return member

    def get(self, futures: Sequence[Any], doing: str, stall_seconds: float | None = None) -> list[Any]:
        """Wait for actor calls and return their results, as ray.get does.

        doing: what is waited for, in words. stall_seconds: the time-out, where it is another than the run's.

        Raises:
            Lost: an actor died or did not move. It is of the kind given to `add`, and names who is to blame.
            Exception: what a call raised, as soon as one did.
        """
        return self.wait(Call(futures, doing, list, stall_seconds))

    def wait(self, call: Call[R]) -> R:
        """Wait for a call and return its answer; nothing else is done meanwhile. Raise what `get` raises."""
        waiting = Waiting(self, call)
        while not waiting.is_over():
            pass
        return waiting.answer()

    def look(self) -> None:
        """Ask everybody how they are, and take in the answers. Never waits. Who is found dead is ended, and lost to whoever
        waits for it next."""
        for member in list(self._members.values()):
            try:
                member.look(heartbeat_seconds(self.stall_seconds))
            except (*DEATHS, RayTaskError) as error:
                if self._failure(member, error, "ask how it is") is None:
                    raise

    def refuse_stalled(
        self, members: Sequence[Member], doing: str, waited_seconds: float, stall_seconds: float | None = None
    ) -> None:
        """Raises: Lost, when one of them stands still that was waited for so long."""
        if stalled := standing_still(members, waited_seconds, stall_seconds or self.stall_seconds):
            raise self.lose(stalled, stalled[0].state(), doing)

    def refuse_lost(self, member: Member) -> None:
        """Raises: Lost, when it was lost before, also while something else was waited for."""
        if (lost := self._lost.get(member.actor._actor_id)) is not None:
            raise lost

    def lose(self, members: Sequence[Member], how: str, doing: str) -> Lost:
        """End actors and their children; returns the error to raise, which says `how`, and what all the others are doing."""
        others = [m.state() for m in self._members.values() if m not in members[:1]]
        for member in members:
            self.end(member)
        lost = members[0].lost(members[0].name, how, f"{doing}: {'. '.join([how, *others])}")
        self._lost |= {member.actor._actor_id: lost for member in members}
        return lost

    def end(self, member: Member) -> None:
        """End an actor and its children, and watch it no more. It does not have to cooperate."""
        if self._members.pop(member.actor._actor_id, None) is None:
            return  # it was ended before
        ray.kill(member.actor)
        if member.heartbeat is not None:
            end_group(member.heartbeat.pid, member.heartbeat.node)

    def _failure(self, member: Member, error: Exception, doing: str) -> Lost | None:
        """Lost, when the error means that the actor or a process of it died; None for any other error."""
        if isinstance(error, RayTaskError) and isinstance(error.cause, Died):
            how = str(error.cause)
        elif isinstance(error, DEATHS) and (member.was_lost or not getattr(error, "actor_init_failed", False)):
            how = _how_ray_says_it(error)
        else:
            return None
        return self.lose([member], f"{member.name} ({member.place}) died: {how}", doing)

    def member_of(self, future: Any) -> Member | None:
        return self._members.get(future.task_id().actor_id())

    def result_of(self, future: Any, doing: str) -> Any:
        try:
            return ray.get(future)
        except (*DEATHS, RayTaskError) as error:
            if (known := self._lost.get(future.task_id().actor_id())) is not None:
                raise known from error
            member = self.member_of(future)
            if member is None:
                raise
            lost = self._failure(member, error, doing) or self._loss_behind(member, error, doing)
            if lost is None:
                raise
            raise lost from error

    def _loss_behind(self, complaining: Member, complaint: Exception, doing: str) -> Lost | None:
        """When one rank dies or stands still, the others' collectives fail, and their complaint may come first."""
        ranks = [m for m in self._members.values() if m.lost is TrainerLost]
        known = next((lost for lost in self._lost.values() if isinstance(lost, TrainerLost)), None)
        if complaining in ranks and known is not None:
            return known  # it was found before
        others = [m for m in ranks if m is not complaining] if complaining in ranks else []
        questions = {m.actor.heartbeat.remote(): m for m in others}
        deadline = time.monotonic() + DEATH_SECONDS
        while questions and time.monotonic() < deadline:
            for question in ray.wait(list(questions), timeout=POLL_SECONDS)[0]:
                member = questions.pop(question)
                try:
                    ray.get(question)
                except DEATHS as error:
                    return self._failure(member, error, doing)
        silent = list(questions.values())
        if not silent or not isinstance(getattr(complaint, "cause", None), RuntimeError):  # what collectives fail with
            return None
        return self.lose(silent, silent[0].state(), doing)


class Waiting(Generic[R]):
    """One wait for a call, a look at a time, so that the caller can do something else between two looks."""

    def __init__(self, watch: Watch, call: Call[R]) -> None:
        self.watch, self.call = watch, call
        self._began = time.monotonic()
        self._results: dict[Any, Any] = {}  # by future

    def is_over(self) -> bool:
        """Look at everybody, wait a moment for results, and return whether all are there. Raise what `Watch.get` raises."""
        watch, call = self.watch, self.call
        left = [future for future in call.futures if future not in self._results]
        if not left:
            return True
        watch.look()
        for future in ray.wait(left, num_returns=len(left), timeout=POLL_SECONDS)[0]:
            self._results[future] = watch.result_of(future, call.doing)
        waited_for = [watch.member_of(future) for future in left if future not in self._results]
        waited_seconds = time.monotonic() - self._began
        watch.refuse_stalled([m for m in waited_for if m], call.doing, waited_seconds, call.stall_seconds)
        return not waited_for

    def answer(self) -> R:
        """Return the call's answer, once `is_over`."""
        return self.call.answer([self._results[future] for future in self.call.futures])


def standing_still(members: Sequence[Member], waited_seconds: float, limit_seconds: float) -> list[Member]:
    """Those to blame. Who does not answer is, before those that answer and do not move: they may be waiting for the former,
    also when its silence is not long enough yet."""
    suspicious_seconds = max(limit_seconds / 2, 3 * heartbeat_seconds(limit_seconds))
    silent = [m for m in members if m.silent_seconds >= suspicious_seconds]
    if silent:
        return [m for m in silent if m.silent_seconds >= limit_seconds]
    return [m for m in members if m.still_seconds(waited_seconds) >= limit_seconds]


def heartbeat_seconds(limit_seconds: float) -> float:
    """Between two questions, so that some go unanswered within the time-out before anybody is blamed."""
    return min(HEARTBEAT_SECONDS, limit_seconds / 5)


def _how_ray_says_it(error: RayError) -> str:
    """The sentence that matters in Ray's page about a dead actor."""
    if getattr(error, "actor_init_failed", False):  # a traceback, whose last line is the error
        return str(error).strip().splitlines()[-1].strip()
    text = " ".join(str(error).split())
    if isinstance(error, OutOfMemoryError):
        found = re.search(r"OOM kill reason: (.*?)(?: Object store memory usage| *$)", text)
        return f"Ray killed it because memory ran out: {found.group(1) if found else text[:300]}".rstrip(". ")
    found = re.search(r"Worker exit detail: (.*?)(?: Some common causes| There are some potential| *$)", text)
    return (found.group(1) if found else text[:300]).rstrip(". ")
