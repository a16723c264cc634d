"""The driver's one handle on all rollout engines: it submits requests, collects groups, loads weights, and replaces
engines that die or stand still while the others continue."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from orchestration.cluster.cpu_cores import CorePlan
from orchestration.cluster.devices import DeviceSpec, shared_engine
from orchestration.cluster.gpu_bundles import shares_its_gpu
from orchestration.cluster.job_shape import EngineJob
from orchestration.cluster.watchdog import EngineLost, EnginesLost, Lost, Watch
from orchestration.engines.actor import RolloutActor, engine_arguments
from orchestration.engines.handle import EngineHandle
from orchestration.engines.requests import AwaitedGroups
from orchestration.metrics.tally import Tally
from orchestration.run.directory import RunDirectory
from records.rollout import Group, Prompt, Trajectory
from rollouts.vllm.engine import LoadReport, Sequences, WeightLoadError
from rollouts.vllm.sampling import Sampling
from rollouts.worker import EngineCounters, GroupRequest

WAIT_SECONDS = 1.0  # at most, before the driver looks around again
MOMENT_SECONDS = 0.05  # the same, while weights under way are to be seen through


@dataclass(frozen=True)
class CurrentWeights:
    """The weights that all engines should hold."""

    version: int
    update: (
        dict[str, Any] | None
    )  # by which an engine that was started again loads them; None: they were broadcast, and are gone
    to_score: Sequences = ()  # what an engine scores once it holds them; see VLLMEngine.load_weights


class EnginePool:
    """All engines, driven together. All responses of a group are made by one engine."""

    def __init__(
        self, engines: list[EngineHandle], watch: Watch, restarts: int, in_flight: str, note: Callable[[str], None]
    ) -> None:
        """Take over engines. restarts: how many may be replaced in total. note: shows the user a sentence for each."""
        self.engines, self.watch, self.note = engines, watch, note
        self.restarts_left, self.in_flight = restarts, in_flight
        self.weights: CurrentWeights | None = None  # None: engines start with the right ones
        self.sleeps = False  # while the trainer works
        self._is_asleep = False
        self._finished: list[Group] = []  # not collected yet
        self._deaths: list[tuple[str, Lost]] = []  # of which engine; in order
        self._tally = Tally()

    @classmethod
    def create(
        cls, job: EngineJob, device: DeviceSpec, run: RunDirectory, options: list[dict[str, Any]],
        cores: CorePlan, watch: Watch, note: Callable[[str], None] = print,
    ) -> EnginePool:  # fmt: skip
        """Begin to start one engine per entry of `options` (Ray actor options); `wait_for_all` waits for them."""
        engines = []
        for i, placed in enumerate(options):
            engine = engine_arguments(job, device, job.seed * len(options) + i, cores.engine_threads)
            if shares_its_gpu(placed):
                engine["engine"] = shared_engine(job.placement, engine["engine"])
            actor_class = ray.remote(RolloutActor).options(**placed)
            log_file = str(run.log_path(f"engine_{i}"))
            arguments = (log_file, engine, job.model, job.reward, job.environment, cores.engine_cores[i])
            engines.append(EngineHandle(f"engine {i}", actor_class, arguments, watch))
        pool = cls(engines, watch, job.failures.engine_restarts, job.in_flight, note)
        pool.sleeps = any(map(shares_its_gpu, options)) or job.pauses_while_training
        return pool

    @property
    def actors(self) -> list[Any]:
        """Return the actors of the engines that have started; they should hold the current weights."""
        return [engine.actor for engine in self.engines if engine.is_started]

    def counters(self) -> list[EngineCounters | None]:
        """Return the last counters of every engine; None for an engine that has not sent any."""
        return [engine.counters for engine in self.engines]

    def tally(self) -> Tally:
        """Return the counts of replaced engines and what they lost, since the last call."""
        tally, self._tally = self._tally, Tally()
        return tally

    def scoring_seconds(self) -> float:
        """Return for how many seconds an engine had only scores outstanding; the largest value of all engines."""
        return max(one.scoring_seconds if one else 0.0 for one in self.counters())

    # ---- requests and groups ----

    def submit(self, requests: list[GroupRequest]) -> None:
        """Let the engines begin these, and return at once. Each goes to the one with the fewest running responses."""
        loads = [engine.responses_under_way for engine in self.engines]
        usable = [i for i, engine in enumerate(self.engines) if engine.state == "usable"]
        usable = usable or list(range(len(self.engines)))
        dealt: dict[int, list[GroupRequest]] = {i: [] for i in usable}
        for request in requests:
            least = min(usable, key=loads.__getitem__)
            loads[least] += request.samples
            dealt[least].append(request)
        for i, part in dealt.items():
            if part:
                self.engines[i].submit(part)

    @property
    def unfinished(self) -> list[GroupRequest]:
        """Return the requests whose groups have not come back yet, engine by engine."""
        return [request for engine in self.engines for request in engine.outstanding.values()]

    def collect(self, wait_seconds: float) -> list[Group]:
        """Return the groups that finished since the last call; wait at most this long for the first one.

        Raises:
            EnginesLost: an engine is lost, and no more may be replaced.
            WeightLoadError: an engine did not load weights whose load nobody waits for.
            Exception: an environment's own error.
        """
        deadline = time.monotonic() + wait_seconds
        while not self._finished:
            self.look(max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline or not self.unfinished:
                break
        groups, self._finished = self._finished, []
        return groups

    def generate(self, requests: list[GroupRequest]) -> list[Group]:
        """Submit requests, wait for their groups, and return them in this order, for a caller with nothing else to do;
        raise what `collect` raises."""
        awaited = AwaitedGroups(requests)
        self.submit(requests)
        others: list[Group] = []
        while not awaited.is_complete:
            others += awaited.take(self.collect(WAIT_SECONDS))
        self._finished = others + self._finished
        return awaited.groups

    def probe(self, prompts: list[Prompt], sampling: Sampling, step: int) -> list[Trajectory]:
        """Return short continuations from every engine that holds the current weights; none when all are being
        replaced; raise EnginesLost when no more may be replaced."""
        usable = [engine for engine in self.engines if engine.state == "usable"]
        calls = [(engine, engine.actor.probe.remote(prompts, sampling, step)) for engine in usable]
        return [t for part in self._results(calls, f"probe, step {step}") for t in part]

    # ---- engines that are lost ----

    def look(self, wait_seconds: float, gives_weights: bool = True) -> None:
        """Take in what engines have finished, replace lost ones, and give the weights to those that were started again.
        Wait at most this long for a call to end. gives_weights: False while other weights are about to be loaded."""
        self.watch.look()
        calls = [call for engine in self.engines for call in engine.open_calls()]
        if calls:
            ray.wait(calls, timeout=min(wait_seconds, WAIT_SECONDS))
        for engine in self.engines:
            try:
                self._finished += engine.take_in()
                if engine.state == "started" and gives_weights and not self._is_asleep:
                    self._give_weights(engine)
                engine.refuse_stalled()
            except EngineLost as lost:
                self.replace(engine, lost)

    def _give_weights(self, engine: EngineHandle) -> None:
        """Let a new engine load the current weights, unless they were broadcast: then they cannot be loaded again."""
        if self.weights is None:
            engine.use()
        elif self.weights.update is not None:
            engine.load(self.weights.version, self.weights.update, self.in_flight, self.weights.to_score)

    @property
    def without_weights(self) -> list[EngineHandle]:
        """Return the engines that were started again and can get the current weights only from the trainer."""
        is_gone = self.weights is not None and self.weights.update is None and not self._is_asleep
        return [engine for engine in self.engines if engine.state == "started"] if is_gone else []

    def replace(self, engine: EngineHandle, lost: Lost) -> None:
        """Start an engine again in place of a lost one; the other engines get its requests.

        Raises:
            EnginesLost: failures.engine_restarts does not allow another one.
        """
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
        self._tally.total("rollout/retried_groups", len(left_behind))
        self.note(
            f"{lost}. It is started again; {len(left_behind)} groups are requested again. Output: {engine.log_file}."
        )
        engine.begin_again()
        if any(other.state == "usable" for other in self.engines):
            engine.outstanding.clear()
            self.submit(left_behind)

    # ---- weights ----

    def load_weights(self, version: int, update: dict[str, Any], stays: bool = True) -> list[LoadReport]:
        """Load a version into every engine that has started, and return their reports. Starting ones get it later.

        stays: whether engines can load by this update later too, which a broadcast does not allow.

        Raises:
            WeightLoadError: an engine did not load it whole. Its responses are requested again after a successful load.
            EngineLost: all were lost meanwhile, and are being replaced.
            EnginesLost: no more may be replaced.
        """
        self.weights = CurrentWeights(version, update if stays else None)
        engines = self.wait_for_one()
        for engine in engines:
            engine.load(version, update, self.in_flight)
        reports: list[LoadReport] = []
        losses: list[EngineLost] = []
        refusals: list[WeightLoadError] = []
        for engine in engines:
            try:
                reports.append(engine.loaded(f"load weights of version {version}"))
            except EngineLost as lost:
                self.replace(engine, lost)
                losses.append(lost)
            except WeightLoadError as error:
                refusals.append(error)
        if refusals or not reports:
            raise (refusals or losses)[-1]
        return reports

    def begin_load(self, version: int, update: dict[str, Any], to_score: Sequences) -> None:
        """Begin what `load_weights` does, without waiting: `collect` and `look` complete it, and raise what it raises.
        `take_reports` then returns the engines' log-probabilities of `to_score`."""
        assert not self.is_loading, "the load before is not over"
        self.weights = CurrentWeights(version, update, to_score)
        for engine in self.engines:
            if engine.is_in_use:
                engine.load(version, update, self.in_flight, to_score)

    @property
    def is_loading(self) -> bool:
        return any(engine.is_loading for engine in self.engines)

    @property
    def has_reports(self) -> bool:
        """Return whether there are reports that nobody has taken."""
        return any(engine.has_reports for engine in self.engines)

    def take_reports(self) -> list[LoadReport]:
        """Return the reports of loads that nobody waited for, each once."""
        return [report for engine in self.engines for report in engine.take_reports()]

    # ---- all together ----

    def drain(self) -> None:
        """Let running responses end; none begins until weights are loaded. Raise EnginesLost when too many are lost."""
        self._all("drain")

    def sleep(self) -> None:
        """Stop generating until `wake`, and give accelerator memory back. Raise EnginesLost when too many are lost."""
        self._is_asleep = True
        self._all("sleep")

    def wake(self) -> None:
        """Take the memory again, and generate. Raise EnginesLost when too many are lost."""
        self._all("wake")
        self._is_asleep = False

    def wait_for_all(self) -> None:
        """Wait until all engines are in use. Raise the error of a first start that failed, or EnginesLost."""
        while not all(engine.is_in_use for engine in self.engines):
            self.look(WAIT_SECONDS)

    def wait_for_one(self) -> list[EngineHandle]:
        """Wait until an engine has started and none is loading, and return those that have started, since all may be in
        the middle of a restart; raise EnginesLost when no more may be replaced."""
        while self.is_loading or not (engines := [engine for engine in self.engines if engine.is_started]):
            self.look(WAIT_SECONDS, gives_weights=False)
        return engines

    def close(self) -> None:
        """End the engines in an orderly way, even if one of them is lost meanwhile."""
        closing = [(engine, engine.actor.close.remote()) for engine in self.engines if engine.is_started]
        for engine, call in closing:
            try:
                self.watch.get([call], f"close {engine.name}")
            except EngineLost as lost:
                self.note(str(lost))
        for engine in self.engines:
            if not engine.is_started:
                engine.end()

    def abandon(self) -> None:
        """End the actors at once, with their engines and scoring processes."""
        for engine in self.engines:
            engine.end()

    def _all(self, what: str) -> None:
        calls = [(engine, getattr(engine.actor, what).remote()) for engine in self.engines if engine.is_in_use]
        self._results(calls, f"{what} engines")

    def _results(self, calls: list[tuple[EngineHandle, Any]], doing: str) -> list[Any]:
        """Wait for the calls to these engines and return the results of those that were not lost."""
        results = []
        for engine, call in calls:
            try:
                results += self.watch.get([call], doing)
            except EngineLost as lost:
                self.replace(engine, lost)
        return results
