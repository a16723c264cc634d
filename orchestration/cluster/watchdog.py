"""All waiting of the driver: no wait lasts for ever, and the actor that stands still is named.

Every registered actor is asked every few seconds what it is doing (`heartbeat`, answered by a thread of its own or
between two awaits, so that a busy actor answers too). An actor that does not answer, or does not move, for as long as
the time-out while the driver waits for it is ended and reported as lost.
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
    """The error of a process that the run depends on and that died or stood still; it has been ended."""

    def __init__(self, name: str, how: str, message: str) -> None:
        super().__init__(message)
        self.name, self.how = name, how  # who, and what happened to it


class TrainerLost(Lost):
    """The error of a lost trainer rank. What it held is in the last checkpoint."""


class EngineLost(Lost):
    """The error of a lost rollout engine. It can be replaced."""


class EnginesLost(RuntimeError):
    """The error of more lost engines than failures.engine_restarts allows; says which, how and how often."""


class Died(RuntimeError):
    """The error that an actor raises when a process that works for it has died; says how."""


class Member:
    """A watched actor."""

    def __init__(self, name: str, actor: Any, lost: type[Lost], was_lost: bool = False) -> None:
        self.name, self.actor, self.lost, self.was_lost = name, actor, lost, was_lost
        self.heartbeat: Heartbeat | None = None  # the last one
        self._question: Any = None
        self._asked_at = 0.0
        self._heartbeat_seconds = HEARTBEAT_SECONDS

    def look(self, heartbeat_seconds: float) -> None:
        """Take in an answer and ask again. Raise what the question raised: one of DEATHS, or the actor's own Died."""
        now, self._heartbeat_seconds = time.monotonic(), heartbeat_seconds
        if self._question is not None and ray.wait([self._question], timeout=0)[0]:
            question, self._question = self._question, None
            self.heartbeat = ray.get(question)
        if self._question is None and now - self._asked_at >= heartbeat_seconds:
            self._question, self._asked_at = self.actor.heartbeat.remote(), now

    @property
    def silent_seconds(self) -> float:
        """Return for how long the last question has been unanswered; 0 when there is none."""
        return 0.0 if self._question is None else time.monotonic() - self._asked_at

    def still_seconds(self, waited_seconds: float) -> float:
        """Return for how long nothing has moved in the actor, but at most the time for which it was waited for."""
        return 0.0 if self.heartbeat is None else min(self.heartbeat.still_seconds, waited_seconds)

    @property
    def place(self) -> str:
        return self.heartbeat.place if self.heartbeat else "it never answered"

    def state(self) -> str:
        """Return in words what the actor is doing."""
        if self.heartbeat is None:
            return f"{self.name} has never answered"
        if self.silent_seconds > 2 * self._heartbeat_seconds:
            return f"{self.name} ({self.place}) has not answered for {self.silent_seconds:.0f} s; before that it was in '{self.heartbeat.phase}'"
        return (
            f"{self.name} ({self.place}) has been in '{self.heartbeat.phase}' for {self.heartbeat.still_seconds:.0f} s"
        )


@dataclass(frozen=True)
class Call(Generic[R]):
    """Calls to actors that have begun, and the function that makes one answer of their results."""

    futures: Sequence[Any]
    doing: str  # in words, for messages
    answer: Callable[[list[Any]], R]  # makes one answer of the results, which are in the order of `futures`
    stall_seconds: float | None = None  # the time-out, where it is another than the run's

    def then(self, change: Callable[[R], S]) -> Call[S]:
        """Return the same call with another answer, which `change` makes of this call's answer."""
        return Call(self.futures, self.doing, lambda results: change(self.answer(results)), self.stall_seconds)


class Watch:
    """The place of all the driver's waits for its actors."""

    def __init__(self, stall_seconds: float) -> None:
        self.stall_seconds = stall_seconds
        self._members: dict[Any, Member] = {}  # by Ray's id of the actor
        self._lost: dict[Any, Lost] = {}  # likewise; for whoever waits for them yet

    def add(self, name: str, actor: Any, lost: type[Lost], was_lost: bool = False) -> Member:
        """Watch an actor with a method `heartbeat() -> Heartbeat`; raise `lost` when it is lost. was_lost: the actor
        replaces a lost one, so a failed construction is a loss too; at a first start it is a wrong argument."""
        member = self._members[actor._actor_id] = Member(name, actor, lost, was_lost)
        return member

    def get(self, futures: Sequence[Any], doing: str, stall_seconds: float | None = None) -> list[Any]:
        """Wait for actor calls and return their results, as ray.get does.

        doing: what is waited for, in words. stall_seconds: the time-out, if it differs from the run's.

        Raises:
            Lost: an actor died or did not move. The error is of the type given to `add`, and names the actor at fault.
            Exception: what a call raised, as soon as one did.
        """
        return self.wait(Call(futures, doing, list, stall_seconds))

    def wait(self, call: Call[R]) -> R:
        """Wait for a call and return its answer; do nothing else meanwhile. Raise what `get` raises."""
        waiting = Waiting(self, call)
        while not waiting.is_over():
            pass
        return waiting.answer()

    def look(self) -> None:
        """Ask every actor for a heartbeat, and take in the answers, without waiting. An actor that is found dead is
        ended; the next wait for it raises its loss."""
        for member in list(self._members.values()):
            try:
                member.look(heartbeat_seconds(self.stall_seconds))
            except (*DEATHS, RayTaskError) as error:
                if self._failure(member, error, "ask how it is") is None:
                    raise

    def refuse_stalled(
        self, members: Sequence[Member], doing: str, waited_seconds: float, stall_seconds: float | None = None
    ) -> None:
        """Raise Lost when one of these actors stood still while it was waited for, for as long as the time-out."""
        if stalled := standing_still(members, waited_seconds, stall_seconds or self.stall_seconds):
            raise self.lose(stalled, stalled[0].state(), doing)

    def refuse_lost(self, member: Member) -> None:
        """Raise Lost when the actor was lost before, also during another wait."""
        if (lost := self._lost.get(member.actor._actor_id)) is not None:
            raise lost

    def lose(self, members: Sequence[Member], how: str, doing: str) -> Lost:
        """End actors and their children; return the error to raise, with `how` and what all others are doing."""
        others = [m.state() for m in self._members.values() if m not in members[:1]]
        for member in members:
            self.end(member)
        lost = members[0].lost(members[0].name, how, f"{doing}: {'. '.join([how, *others])}")
        self._lost |= {member.actor._actor_id: lost for member in members}
        return lost

    def end(self, member: Member) -> None:
        """End an actor and its children, even if it does not cooperate, and watch it no more."""
        if self._members.pop(member.actor._actor_id, None) is None:
            return  # it was ended before
        ray.kill(member.actor)
        if member.heartbeat is not None:
            end_group(member.heartbeat.pid, member.heartbeat.node)

    def _failure(self, member: Member, error: Exception, doing: str) -> Lost | None:
        """End the actor and return its loss if the error means a death, of it or a process of it; else return None."""
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
        """Return the loss of another rank if it may be why this one's collective failed, else None."""
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
    """One wait for a call, in short looks, so that the caller can do something else between two looks."""

    def __init__(self, watch: Watch, call: Call[R]) -> None:
        self.watch, self.call = watch, call
        self._began = time.monotonic()
        self._results: dict[Any, Any] = {}  # by future

    def is_over(self) -> bool:
        """Look at all actors, wait a moment, and return whether all results came. Raise what `Watch.get` raises."""
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
        """Return the call's answer; call this only when `is_over`."""
        return self.call.answer([self._results[future] for future in self.call.futures])


def standing_still(members: Sequence[Member], waited_seconds: float, limit_seconds: float) -> list[Member]:
    """Return the actors at fault. Silent ones come before those that answer and do not move, because the latter may be
    waiting for the former, even if these have not been silent for long enough yet."""
    suspicious_seconds = max(limit_seconds / 2, 3 * heartbeat_seconds(limit_seconds))
    silent = [m for m in members if m.silent_seconds >= suspicious_seconds]
    if silent:
        return [m for m in silent if m.silent_seconds >= limit_seconds]
    return [m for m in members if m.still_seconds(waited_seconds) >= limit_seconds]


def heartbeat_seconds(limit_seconds: float) -> float:
    """Return the seconds between two questions, so few that several go unanswered before an actor counts as lost."""
    return min(HEARTBEAT_SECONDS, limit_seconds / 5)


def _how_ray_says_it(error: RayError) -> str:
    """Return the sentence that matters in Ray's page about a dead actor."""
    if getattr(error, "actor_init_failed", False):  # a traceback, whose last line is the error
        return str(error).strip().splitlines()[-1].strip()
    text = " ".join(str(error).split())
    if isinstance(error, OutOfMemoryError):
        found = re.search(r"OOM kill reason: (.*?)(?: Object store memory usage| *$)", text)
        return f"Ray killed it because memory ran out: {found.group(1) if found else text[:300]}".rstrip(". ")
    found = re.search(r"Worker exit detail: (.*?)(?: Some common causes| There are some potential| *$)", text)
    return (found.group(1) if found else text[:300]).rstrip(". ")
