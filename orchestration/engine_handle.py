"""One rollout engine as the driver sees it: its actor, what it was asked, and the calls to it that are under way."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

import ray
from ray.exceptions import RayTaskError

from orchestration.watchdog import START_SECONDS, EngineLost, Watch
from rollouts.engine import LoadReport, WeightLoadError
from rollouts.records import Group
from rollouts.sampling import Sampling
from rollouts.worker import Asking, Collected

COLLECT_SECONDS = 1.0  # that an engine waits for its first finished group before it answers without one

# usable: it holds the current weights, and generates. starting: a new actor starts. started: it needs weights. loading: they come.
# refused: it did not take weights, and cannot be used until others load.
State = Literal["usable", "starting", "started", "loading", "refused"]


@dataclass(frozen=True)
class Outstanding:
    """An asking whose group did not come back yet, with all it takes to ask it again."""

    asking: Asking
    sampling: Sampling
    step: int


def rounds(outstanding: Iterable[Outstanding]) -> Iterator[tuple[list[Asking], Sampling, int]]:
    """What can be asked in one call: askings that follow one another, of one sampling and step."""
    for (sampling, step), ones in groupby(outstanding, key=lambda one: (one.sampling, one.step)):
        yield [one.asking for one in ones], sampling, step


class EngineHandle:
    """The driver's side of one engine, which may be replaced. `actor` is the present one."""

    def __init__(self, name: str, actor_class: Any, arguments: tuple[Any, ...], watch: Watch) -> None:
        """actor_class: with Ray's options. arguments: of its construction, the log file first."""
        self.name, self.watch = name, watch
        self._actor_class, self._arguments = actor_class, arguments
        self.log_file: str = arguments[0]
        self.outstanding: dict[str, Outstanding] = {}  # by group id
        self.counters: Collected | None = None
        self._was_refused = False
        self._late: list[Group] = []  # came while something else was waited for
        self._create()
        self.state: State = "usable"  # whoever created it waits for its start

    def _create(self) -> None:
        self.actor = self._actor_class.remote(*self._arguments)
        self.member = self.watch.add(self.name, self.actor, EngineLost)
        self._begun: set[str] = set()  # group ids that this actor was asked
        self._asking: list[Any] = []  # calls under way
        self._collecting: Any = None  # the one call of `collect` under way
        self._changing: Any = None  # the call that brings it to the next state
        self.report: LoadReport | None = None  # of the last load that nobody waited for
        self._since = time.monotonic()  # when it last got something to do

    @property
    def is_started(self) -> bool:
        return self.state != "starting"

    @property
    def is_in_use(self) -> bool:
        """It has had weights before: it is not a new one on its way."""
        return self.state in ("usable", "refused")

    @property
    def is_loading(self) -> bool:
        """Weights come, while it goes on generating or before it begins to."""
        return self._changing is not None and self.state != "starting"

    @property
    def responses_under_way(self) -> int:
        return sum(one.asking.samples for one in self.outstanding.values())

    def ask(self, askings: list[Asking], sampling: Sampling, step: int) -> None:
        """Have it begin these; as soon as it can, when it is being replaced."""
        self.outstanding |= {asking.group_id: Outstanding(asking, sampling, step) for asking in askings}
        if self.state == "usable":
            self._begin()

    def _begin(self) -> None:
        """Ask it what it was not asked yet."""
        if not self._begun:
            self._since = time.monotonic()
        for askings, sampling, step in rounds(o for name, o in self.outstanding.items() if name not in self._begun):
            self._asking.append(self.actor.ask.remote(askings, sampling, step))
        self._begun = set(self.outstanding)

    def open_calls(self) -> list[Any]:
        """Calls whose end would be news. `collect` is among them as long as there is something to collect."""
        if self.state == "usable" and self.outstanding and self._collecting is None:
            self._collecting = self.actor.collect.remote(COLLECT_SECONDS)
        return [call for call in (self._collecting, self._changing) if call is not None]

    def take_in(self) -> list[Group]:
        """The groups that have come, and the next state if it is reached. Never waits.

        Raises:
            EngineLost: it died, or could not be started again.
            Any error of an environment.
        """
        self._asking = [call for call in self._asking if not self._was_done(call)]
        if self._collecting is not None and _has_ended(self._collecting):
            self._collect()
        if self._changing is not None and _has_ended(self._changing):
            report = self._result(self._changing, f"load weights into {self.name}")
            self._changing = None
            if self.state == "starting":
                self.state = "started"
            else:
                self.report = report
                self.use()
        groups, self._late = self._late, []
        return groups

    def _was_done(self, call: Any) -> bool:
        """Whether it has ended. Raises what it raised."""
        if _has_ended(call):
            self._result(call, "ask")
            return True
        return False

    def _collect(self) -> None:
        """Take in what `collect` answered, or will answer in a moment."""
        call, self._collecting = self._collecting, None
        try:
            found: Collected = self._result(call, "collect")
        except WeightLoadError:
            if self.state != "refused":
                raise
            return  # its responses are asked again
        self.counters = replace(found, groups=[])
        for group in found.groups:
            del self.outstanding[group.group_id]
            self._begun.discard(group.group_id)
        self._late += found.groups

    def _result(self, call: Any, doing: str) -> Any:
        try:
            return self.watch.get([call], doing)[0]
        except RayTaskError as error:
            if self.state in ("starting", "loading"):  # a new actor: whatever it is, it did not get that far
                raise self.watch.lose([self.member], f"did not start again: {error}", doing) from error
            raise

    def load(self, version: int, update: dict[str, Any], in_flight: str) -> None:
        """Begin to load weights; a new engine goes on to generate afterwards by itself."""
        self._was_refused = self.state == "refused"
        if self.state != "usable":
            self.state = "loading"
        self._changing = self.actor.load_weights.remote(version, update, in_flight)

    def loaded(self, doing: str) -> Any:
        """Wait for the end of `load`; returns the engine's report.

        Raises:
            EngineLost: it died or stood still.
            WeightLoadError: it did not take the weights, and cut off its responses. They are asked again after the next load.
        """
        call, self._changing = self._changing, None
        try:
            (report,) = self.watch.get([call], doing)
        except WeightLoadError:
            self.state = "refused"
            raise
        self.use()
        return report

    def use(self) -> None:
        """It holds the current weights: what it is not generating yet, it is asked."""
        if self._was_refused:
            if self._collecting is not None:
                self.state = "refused"
                self._collect()
            self._asking.append(self.actor.withdraw.remote(list(self._begun)))
            self._begun, self._was_refused = set(), False
        self.state = "usable"
        self._begin()

    def refuse_stalled(self) -> None:
        """Raises: EngineLost, when it should be moving and is not, or was found dead by somebody else."""
        self.watch.refuse_lost(self.member)
        seconds = time.monotonic() - self._since
        if self.state == "starting":
            self.watch.refuse_stalled([self.member], "start again", seconds, START_SECONDS)
        elif self.outstanding or self._changing is not None:
            self.watch.refuse_stalled([self.member], "generate", seconds)

    def begin_again(self) -> None:
        """A new actor in the place of one that was ended."""
        self._create()
        self.state, self.report = "starting", None
        self._changing = self.actor.start.remote()

    def end(self) -> None:
        """End the actor at once, with its engine and scoring processes."""
        self.watch.end(self.member)


def _has_ended(call: Any) -> bool:
    return bool(ray.wait([call], timeout=0)[0])
