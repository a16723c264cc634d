"""The driver's one handle on all rollout engines: prompts are asked, groups collected, weights loaded. An engine that dies or
stands still is replaced while the others go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from orchestration.cluster.cpu_cores import CorePlan
from orchestration.cluster.devices import DeviceSpec, shared_engine
from orchestration.cluster.gpu_bundles import shares_its_gpu
from orchestration.cluster.job_shape import EngineJob
from orchestration.cluster.watchdog import EngineLost, EnginesLost, Watch
from orchestration.engines.actor import RolloutActor, engine_arguments
from orchestration.engines.handle import EngineHandle, message_of, rounds
from orchestration.engines.requests import Rollouts, step_requests
from orchestration.metrics.tally import Tally
from orchestration.run.directory import RunDirectory
from records.rollout import Group, Prompt, Trajectory
from rollouts.vllm.engine import LoadReport, Sequences, WeightLoadError
from rollouts.vllm.sampling import Sampling
from rollouts.vllm.weight_broadcast import TransferFailed
from rollouts.worker import Collected, GroupRequest

WAIT_SECONDS = 1.0  # at most, before the driver looks around again
MOMENT_SECONDS = 0.05  # the same, while weights under way are to be seen through


class EnginePool:
    """All engines, driven together. A group stays whole on one engine."""

    def __init__(
        self, engines: list[EngineHandle], watch: Watch, restarts: int, in_flight: str, note: Callable[[str], None]
    ) -> None:
        """restarts: engines that may be replaced, all together. note: told of every one."""
        self.engines, self.watch, self.note = engines, watch, note
        self.restarts_left, self.in_flight = restarts, in_flight
        self.on_restart: Callable[[Any], object] | None = None
        """Gives a new engine's actor the weights; returns None when it cannot now, and the next load_weights must. Without it,
        the last update is loaded again."""
        self.sleeps = False  # while the trainer works
        self._update: tuple[int, dict[str, Any]] | None = None  # the weights that engines should hold
        self._is_asleep = False
        self._holds_back = False  # new engines are not given weights now
        self._arrived: list[Group] = []  # collected while something else was waited for
        self._deaths: list[tuple[str, EngineLost]] = []  # of which engine; in order
        self._tally = Tally()

    @classmethod
    def create(
        cls, job: EngineJob, device: DeviceSpec, run: RunDirectory, options: list[dict[str, Any]],
        cores: CorePlan, watch: Watch, note: Callable[[str], None] = print,
    ) -> EnginePool:  # fmt: skip
        """One engine per entry of `options` (Ray actor options), which begin to start; `wait_for_all` sees it through."""
        engines = []
        for i, placed in enumerate(options):
            engine = engine_arguments(job, device, job.seed * len(options) + i, cores.engine_threads)
            if shares_its_gpu(placed):
                engine["engine"] = shared_engine(job.placement, engine["engine"])
            actor_class = ray.remote(RolloutActor).options(**placed)
            log_file = str(run.log_path(f"engine_{i}"))
            arguments = (log_file, engine, job.model, job.reward, job.environment, cores.engine_cores[i])
            engines.append(EngineHandle(f"engine {i}", actor_class, arguments, watch))
        group = cls(engines, watch, job.failures.engine_restarts, job.in_flight, note)
        group.sleeps = any(map(shares_its_gpu, options)) or job.pauses_while_training
        return group

    @property
    def actors(self) -> list[Any]:
        """Of the engines that have started, and should hold the current weights."""
        return [engine.actor for engine in self.engines if engine.is_started]

    def counters(self) -> list[Collected | None]:
        """The last ones of every engine; None: not heard of yet."""
        return [engine.counters for engine in self.engines]

    def tally(self) -> Tally:
        """What was done about lost engines since the last call."""
        tally, self._tally = self._tally, Tally()
        return tally

    def ask(self, requests: list[GroupRequest], sampling: Sampling, step: int) -> None:
        """Have the engines begin these askings; returns at once. Each goes to the engine with the fewest responses under way."""
        loads = [engine.responses_under_way for engine in self.engines]
        usable = [i for i, engine in enumerate(self.engines) if engine.state == "usable"] or list(
            range(len(self.engines))
        )
        dealt: dict[int, list[GroupRequest]] = {i: [] for i in usable}
        for request in requests:
            least = min(usable, key=loads.__getitem__)
            loads[least] += request.samples
            dealt[least].append(request)
        for i, part in dealt.items():
            if part:
                self.engines[i].ask(part, sampling, step)

    def collect(self, wait_seconds: float) -> list[Group]:
        """Groups that finished since the last call; waits at most this long for the first one.

        Raises:
            EnginesLost: an engine is lost, and no more may be replaced.
            Any error of an environment; WeightLoadError.
        """
        deadline = time.monotonic() + wait_seconds
        while not self._arrived:
            self._turn(max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline or not self.unfinished:
                break
        groups, self._arrived = self._arrived, []
        return groups

    @property
    def unfinished(self) -> list[GroupRequest]:
        """Askings whose groups did not come back yet, engine by engine."""
        return [one.request for engine in self.engines for one in engine.outstanding.values()]

    def _turn(self, wait_seconds: float) -> None:
        """Take in what engines have finished, and go on with those that are being replaced."""
        self.watch.look()
        calls = [call for engine in self.engines for call in engine.open_calls()]
        if calls:
            ray.wait(calls, timeout=min(wait_seconds, WAIT_SECONDS))
        for engine in self.engines:
            try:
                self._arrived += engine.take_in()
                if engine.state == "started" and not self._holds_back:
                    self._bring_up(engine)
                engine.refuse_stalled()
            except EngineLost as lost:
                self._replace(engine, lost)

    def _bring_up(self, engine: EngineHandle) -> None:
        """Give a new engine the weights, and what it is to generate."""
        if self.on_restart is not None:
            try:
                has_come = self.on_restart(engine.actor) is not None
            except (WeightLoadError, TransferFailed) as error:
                how = f"{engine.name} was started again and did not take the weights: {message_of(error)}"
                raise self.watch.lose([engine.member], how, "begin again") from error
            if has_come:
                engine.use()
        elif self._update is None:
            engine.use()
        else:
            engine.load(*self._update, self.in_flight)

    def _replace(self, engine: EngineHandle, lost: EngineLost) -> None:
        if (engine.name, lost) not in self._deaths:  # one that is not replaced is met again by whoever looks next
            self._deaths.append((engine.name, lost))
        if self.restarts_left == 0:
            past = "; ".join(one.how for _, one in self._deaths)
            raise EnginesLost(
                f"{lost}. That is loss number {len(self._deaths)} of this run, and failures.engine_restarts = "
                f"{len(self._deaths) - 1}. In order: {past}. The engine's output is in {engine.log_file}."
            ) from lost
        self.restarts_left -= 1
        left_behind = list(engine.outstanding.values())
        self._tally.total("rollout/engine_restarts", 1)
        self._tally.total("rollout/discarded_tokens", engine.tokens_under_way)
        self._tally.total("rollout/reasked_groups", len(left_behind))
        self.note(f"{lost}. It is started again; {len(left_behind)} groups are asked again. Output: {engine.log_file}.")
        engine.begin_again()
        if any(other.state == "usable" for other in self.engines):
            engine.outstanding.clear()
            for requests, sampling, step in rounds(left_behind):
                self.ask(requests, sampling, step)

    def generate(
        self, prompts: list[Prompt], samples: int, sampling: Sampling, step: int, label: str,
        earlier: Sequence[Prompt] = (),
    ) -> Rollouts:  # fmt: skip
        """Ask every prompt `samples` times, beside what is under way; groups come back in the order of `prompts`.

        earlier: prompts already asked in this step. Group ids go on from there, and a prompt that is asked again, also
        within `prompts`, gets samples of other seeds. Raises: as `collect`.
        """
        requests = step_requests(prompts, samples, f"{label}-{step}", earlier)
        began, scoring = time.monotonic(), self.scoring_seconds()
        self.ask(requests, sampling, step)
        made: dict[str, Group] = {}
        others: list[Group] = []
        ids = {request.group_id for request in requests}
        while len(made) < len(ids):
            for group in self.collect(WAIT_SECONDS):
                if group.group_id in ids:
                    made[group.group_id] = group
                else:
                    others.append(group)
        self._arrived = others + self._arrived
        seconds, scoring = time.monotonic() - began, self.scoring_seconds() - scoring
        reward_seconds = min(seconds, max(0.0, scoring))
        return Rollouts([made[request.group_id] for request in requests], seconds - reward_seconds, reward_seconds)

    def scoring_seconds(self) -> float:
        """In which an engine had only scores outstanding, so far; the largest of all engines'."""
        return max(one.scoring_seconds if one else 0.0 for one in self.counters())

    def load_weights(self, version: int, update: dict[str, Any]) -> list[Any]:
        """Load a version into every engine that has started; returns their LoadReports. Those that are starting get it later.

        Raises:
            WeightLoadError: an engine did not take it whole. Its responses are asked again after a load that succeeds.
            EngineLost: all were lost meanwhile, and are being replaced.
            EnginesLost: as `collect`.
        """
        self._update = (version, update)
        self._holds_back = True  # a new engine is to get this version, not the one before
        try:
            return self._load_into(self._started(), version, update)
        finally:
            self._holds_back = self._is_asleep

    def _load_into(self, engines: list[EngineHandle], version: int, update: dict[str, Any]) -> list[Any]:
        """The reports of those that were not lost meanwhile."""
        for engine in engines:
            engine.load(version, update, self.in_flight)
        reports: list[Any] = []
        losses: list[EngineLost] = []
        refusals: list[WeightLoadError] = []
        for engine in engines:
            try:
                reports.append(engine.loaded(f"load weights of version {version}"))
            except EngineLost as lost:
                self._replace(engine, lost)
                losses.append(lost)
            except WeightLoadError as error:
                refusals.append(error)
        if refusals or not reports:
            raise (refusals or losses)[-1]
        return reports

    def begin_load(self, version: int, update: dict[str, Any], to_score: Sequences) -> None:
        """As `load_weights`, without waiting: `collect` sees it through, and raises what it raises. `load_reports` will have the
        log-probabilities of what is to be scored."""
        self._update = (version, update)
        for engine in self.engines:
            if engine.is_in_use:
                engine.report = None
                engine.load(version, update, self.in_flight, to_score)

    @property
    def is_loading(self) -> bool:
        return any(engine.is_loading for engine in self.engines)

    def wait_a_moment(self) -> None:
        """Let a moment pass, and take in what has come: groups stay for `collect`."""
        self._turn(MOMENT_SECONDS)

    @property
    def load_reports(self) -> list[LoadReport]:
        """Of the engines that have taken what `begin_load` began; one that was replaced meanwhile has none."""
        return [engine.report for engine in self.engines if engine.report is not None]

    def probe(self, prompts: list[Prompt], sampling: Sampling, step: int) -> list[Trajectory]:
        """Short continuations from every engine that holds the current weights. Raises: EnginesLost."""
        found: list[Trajectory] = []
        while not found:
            while not (usable := [engine for engine in self.engines if engine.state == "usable"]):
                self._turn(WAIT_SECONDS)
            calls = [(engine, engine.actor.probe.remote(prompts, sampling, step)) for engine in usable]
            for engine, call in calls:
                try:
                    found += self.watch.get([call], doing=f"probe, step {step}")[0]
                except EngineLost as lost:
                    self._replace(engine, lost)
        return found

    def drain(self) -> None:
        """Let running responses end; none begins until weights come. Raises: EnginesLost."""
        self._all("drain")

    def sleep(self) -> None:
        """Stop generating, and give accelerator memory back, until `wake`."""
        self._is_asleep = self._holds_back = True
        self._all("sleep")

    def wake(self) -> None:
        """Take the memory again, and go on."""
        self._all("wake")
        self._is_asleep = self._holds_back = False

    def _all(self, what: str) -> None:
        calls = [(engine, getattr(engine.actor, what).remote()) for engine in self.engines if engine.is_in_use]
        for engine, call in calls:
            try:
                self.watch.get([call], doing=f"{what} engines")
            except EngineLost as lost:
                self._replace(engine, lost)

    def wait_for_all(self) -> None:
        """Until all engines are in use. Raises: what kept one from its first start; EnginesLost."""
        while not all(engine.is_in_use for engine in self.engines):
            self._turn(WAIT_SECONDS)

    def wait_for_one(self) -> None:
        """Until an engine has started: all may be on their way anew. Raises: EnginesLost."""
        self._started()

    def _started(self) -> list[EngineHandle]:
        """Those that have started; waits for one when all are being replaced."""
        while not (engines := [engine for engine in self.engines if engine.is_started]):
            self._turn(WAIT_SECONDS)
        return engines

    def close(self) -> None:
        """End the engines in an orderly way; one that is lost meanwhile keeps nobody from it."""
        closing = [(engine, engine.actor.close.remote()) for engine in self.engines if engine.is_started]
        for engine, call in closing:
            try:
                self.watch.get([call], doing=f"close {engine.name}")
            except EngineLost as lost:
                self.note(str(lost))
        for engine in self.engines:
            if not engine.is_started:
                engine.end()

    def abandon(self) -> None:
        """End the actors at once, with their engines and scoring processes."""
        for engine in self.engines:
            engine.end()
