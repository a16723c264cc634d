"""One rollout engine as the driver sees it: its actor, the requests to it, and the calls to it that are under way."""

from __future__ import annotations

import re
import time
from typing import Any, Literal

import ray
from ray.exceptions import RayTaskError

from orchestration.cluster.watchdog import START_SECONDS, EngineLost, Lost, Watch
from records.rollout import Group
from rollouts.vllm.engine import LoadReport, Sequences, WeightLoadError
from rollouts.worker import EngineCounters, GroupRequest

COLLECT_SECONDS = 1.0  # that an engine waits for its first finished group before it answers without one

# usable: it holds the current weights, and generates. starting: a new actor starts. started: it needs weights. loading:
# they come. refused: it did not take weights, and cannot be used until others load.
State = Literal["usable", "starting", "started", "loading", "refused"]


class EngineHandle:
    """The driver's side of one engine, which may be replaced. `actor` is the present one."""

    def __init__(self, name: str, actor_class: Any, arguments: tuple[Any, ...], watch: Watch) -> None:
        """Begin to start the engine. actor_class: with Ray's options. arguments: the actor's, the log file first."""
        self.name, self.watch = name, watch
        self._actor_class, self._arguments = actor_class, arguments
        self.log_file: str = arguments[0]
        self.outstanding: dict[str, GroupRequest] = {}  # by group id: what did not come back yet
        self._was_refused = False
        self._finished: list[Group] = []  # collected and not taken in yet
        self._is_first = True  # nothing was lost yet: what keeps it from starting is a mistake in what it was told
        self._create()

    def _create(self) -> None:
        self.actor = self._actor_class.remote(*self._arguments)
        self.member = self.watch.add(self.name, self.actor, EngineLost, was_lost=not self._is_first)
        self._submitted: set[str] = set()  # group ids that this actor was given
        self._submitting: list[Any] = []  # calls under way
        self._collecting: Any = None  # the one call of `collect` under way
        self.state: State = "starting"
        self._changing: Any = self.actor.start.remote()  # the call that brings it to the next state
        self.counters: EngineCounters | None = None  # of this actor; None: not heard of yet
        self._tokens_delivered = 0  # of this actor, in groups that have come
        self._reports: list[LoadReport] = []  # of loads that nobody waited for, and that nobody has read
        self._since = time.monotonic()  # when it last got something to do

    @property
    def is_started(self) -> bool:
        return self.state != "starting"

    @property
    def is_in_use(self) -> bool:
        """Return whether the engine has had weights before, and is not a new one that is starting."""
        return self.state in ("usable", "refused")

    @property
    def tokens_under_way(self) -> int:
        """Return how many tokens, at the last count, are in no group that has come; they are lost with the engine."""
        return 0 if self.counters is None else max(0, self.counters.tokens_generated - self._tokens_delivered)

    @property
    def is_loading(self) -> bool:
        """Return whether weights are loading, either while the engine generates or before it begins."""
        return self._changing is not None and self.state != "starting"

    @property
    def responses_under_way(self) -> int:
        return sum(request.samples for request in self.outstanding.values())

    def submit(self, requests: list[GroupRequest]) -> None:
        """Let the engine begin these requests now, or as soon as it can when it is being replaced."""
        self.outstanding |= {request.group_id: request for request in requests}
        if self.state == "usable":
            self._submit_new()

    def _submit_new(self) -> None:
        """Submit the requests that the actor does not have yet."""
        if not self._submitted:
            self._since = time.monotonic()
        requests = [request for name, request in self.outstanding.items() if name not in self._submitted]
        if requests:
            self._submitting.append(self.actor.submit.remote(requests))
        self._submitted = set(self.outstanding)

    def open_calls(self) -> list[Any]:
        """Return the calls to wait for. `collect` is one of them as long as there is something to collect."""
        if self.state == "usable" and self.outstanding and self._collecting is None:
            self._collecting = self.actor.collect.remote(COLLECT_SECONDS)
        return [call for call in (self._collecting, self._changing) if call is not None]

    def take_in(self) -> list[Group]:
        """Return the groups that have come, and go to the next state if it is reached, without waiting.

        Raises:
            EngineLost: it died, could not be started again, or did not load the weights after a restart.
            WeightLoadError: it did not load weights that nobody waits for.
            Exception: an environment's own error, or that of a first start: a wrong model, engine argument or reward.
        """
        self._submitting = [call for call in self._submitting if not self._was_done(call)]
        if self._collecting is not None and _has_ended(self._collecting):
            self._collect()
        if self._changing is not None and _has_ended(self._changing):
            self._change()
        groups, self._finished = self._finished, []
        return groups

    def _change(self) -> None:
        """Go to the next state, because the call that leads to it has ended."""
        call, self._changing = self._changing, None
        doing = f"{'start' if self.state == 'starting' else 'load weights into'} {self.name}"
        try:
            report = self._result(call, doing)
        except WeightLoadError as error:
            if self.state == "loading":
                raise self.lost_without_weights(error) from error
            self.state = "refused"
            raise
        if self.state == "starting":
            self.state, self._is_first = "started", False
            self._since = time.monotonic()  # its last heartbeat is of the start, which has a time-out of its own
        else:
            self._reports.append(report)
            self.use()

    def _was_done(self, call: Any) -> bool:
        """Return whether a call of `submit` has ended. Raise what it raised."""
        if _has_ended(call):
            self._result(call, "submit requests")
            return True
        return False

    def _collect(self) -> None:
        """Take in the answer of `collect`, which is there or comes in a moment."""
        call, self._collecting = self._collecting, None
        try:
            groups, self.counters = self._result(call, "collect")
        except WeightLoadError:
            if self.state != "refused" and not self.is_loading:
                raise
            return  # whoever loads is told why; its responses are requested again
        self._tokens_delivered += sum(t.action_tokens for group in groups for t in group.trajectories)
        for group in groups:
            del self.outstanding[group.group_id]
            self._submitted.discard(group.group_id)
        self._finished += groups

    def _result(self, call: Any, doing: str) -> Any:
        try:
            return self.watch.get([call], doing)[0]
        except WeightLoadError:
            raise
        except RayTaskError as error:
            if self.state not in ("starting", "loading") or (self._is_first and not was_killed(error)):
                raise
            how = f"{self.name} did not start{'' if self._is_first else ' again'}: {message_of(error)}"
            raise self.watch.lose([self.member], how, doing) from error

    def load(self, version: int, update: dict[str, Any], in_flight: str, to_score: Sequences = ()) -> None:
        """Begin to load weights; a new engine generates afterwards. to_score: see VLLMEngine.load_weights."""
        self._was_refused = self.state == "refused"
        if self.state != "usable":
            self.state = "loading"
        self._changing = self.actor.load_weights.remote(version, update, in_flight, to_score)

    def loaded(self, doing: str) -> LoadReport:
        """Wait for the end of `load` and return the engine's report.

        Raises:
            EngineLost: it died or stood still.
            WeightLoadError: it did not load the weights, and cut off its responses. The next load requests them again.
        """
        call, self._changing = self._changing, None
        try:
            (report,) = self.watch.get([call], doing)
        except WeightLoadError:
            self.state = "refused"
            raise
        self.use()
        return report

    @property
    def has_reports(self) -> bool:
        return bool(self._reports)

    def take_reports(self) -> list[LoadReport]:
        """Return the reports of loads that nobody waited for, each once."""
        reports, self._reports = self._reports, []
        return reports

    def use(self) -> None:
        """Mark the engine as one that holds the current weights, and submit the requests that wait for it."""
        if self._was_refused:
            self._cancel()
        self.state = "usable"
        self._since = time.monotonic()  # older heartbeats are of the load, or of a wait for it
        self._submit_new()

    def _cancel(self) -> None:
        """Cancel the responses that were cut off when it refused weights, so that they can be requested again. Wait for
        all calls that name these groups, because Ray does not keep the order of an asynchronous actor's calls."""
        if self._collecting is not None:
            self.state = "refused"
            self._collect()
        for call in self._submitting:
            self._result(call, "submit requests")
        self._result(self.actor.cancel.remote(list(self._submitted)), "cancel requests")
        self._submitting, self._submitted, self._was_refused = [], set(), False

    def refuse_stalled(self) -> None:
        """Raise EngineLost when the engine should move and does not, or when another wait found it dead."""
        self.watch.refuse_lost(self.member)
        seconds = time.monotonic() - self._since
        if self.state == "starting":
            self.watch.refuse_stalled([self.member], f"start {self.name}", seconds, START_SECONDS)
        elif self.outstanding or self._changing is not None:
            self.watch.refuse_stalled([self.member], "generate", seconds)

    def lost_without_weights(self, error: Exception) -> Lost:
        """End a new engine that did not load the weights and is of no use; return the loss."""
        how = f"{self.name} was started again and did not take the weights: {message_of(error)}"
        return self.watch.lose([self.member], how, "begin again")

    def begin_again(self) -> None:
        """Start a new actor in place of one that was ended."""
        self._is_first = False
        self._create()

    def end(self) -> None:
        """End the actor at once, with its engine and scoring processes."""
        self.watch.end(self.member)


def message_of(error: Exception) -> str:
    """Return the text of the original error, without the remote traceback that Ray adds."""
    return str(getattr(error, "cause", error))


def was_killed(error: Exception) -> bool:
    """Return whether vLLM did not start because a signal ended its process. Its message holds {'EngineCore_DP0': -9},
    or {} when the exit code was not known yet."""
    return re.search(r"Failed core proc\(s\): \{(\}|[^}]*: -\d)", str(error)) is not None


def _has_ended(call: Any) -> bool:
    return bool(ray.wait([call], timeout=0)[0])
