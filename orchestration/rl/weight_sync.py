"""One synchronisation: publish the trainer's weights, load them into every engine, prove that the engines hold them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from configs.blocks.rl import RLConfig
from configs.blocks.sync import SyncMethod
from orchestration.cluster.watchdog import EngineLost
from orchestration.engines.handle import message_of
from orchestration.engines.pool import EnginePool
from orchestration.metrics.tally import Tally
from orchestration.rl.weight_probe import compare, tolerance_for
from orchestration.trainer.ranks import TrainerRanks
from orchestration.trainer.recompute import recomputed_columns
from records.rollout import Prompt
from rollouts.vllm.engine import LoadReport, Sequences, WeightLoadError
from rollouts.vllm.sampling import Sampling
from rollouts.vllm.weight_broadcast import TransferFailed

FALL_BACK: dict[SyncMethod, SyncMethod] = {"nccl": "direct", "direct": "disk"}
JOIN_SECONDS = 120.0  # for a group to come together; NCCL's first connection between machines takes tens of seconds
JOINING, PUBLISHING, SENDING = "joining the weight group", "publishing weights", "broadcasting weights"
LOADING = "loading weights into a new engine"
REFUSALS = (WeightLoadError, TransferFailed)  # what a method may fail with; anything else is a fault and ends the run


class SyncError(RuntimeError):
    """The engines could not be brought to the trainer's weights."""


def ray_get(futures: list[Any], doing: str) -> list[Any]:
    """Wait without a watchdog."""
    return ray.get(futures)


class WeightSync:
    """Brings engines to the trainer's weights, version after version, by the configured method or the next that works.

    With nccl the engines and trainer rank 0 are in a group, which is made anew whenever the engines are others than before.
    """

    def __init__(
        self,
        config: RLConfig,
        trainers: TrainerRanks,
        rollouts: EnginePool,
        warn: Callable[[str], None],
        get: Callable[[list[Any], str], list[Any]] = ray_get,
    ) -> None:
        """warn: shows a sentence to the user. get(futures, doing): waits for actors; the watchdog's."""
        self.config, self.trainers, self.rollouts = config, trainers, rollouts
        self.warn, self.get = warn, get
        self.method: SyncMethod = config.sync.method
        self._connected: list[Any] = []  # the engines' actors in the group
        self._joined: list[Any] = []  # those that were to be in the last one, whether or not it came together
        self.version = 0  # that was pushed last: engines hold it, or it is on its way to them
        self._was_pushed = False  # engines start from version 0
        self._notice: dict[str, Any] | None = None  # of that version, when it is in a file

    def push(self, version: int) -> Tally:
        """Publish the trainer's weights as `version` and load them into all engines; all of them hold it afterwards.

        Raises SyncError: it failed, in overlap mode or by every method that was left.
        """
        tally = Tally()
        self._until_it_works(lambda: self._push(version, tally), tally)
        return tally

    def publish(self, version: int) -> tuple[dict[str, Any], Tally]:
        """The first half of `push`, for methods that leave a version where engines take it when they like: the notice that
        engines load it by. Raises SyncError."""
        assert self.method != "nccl", "a broadcast takes both sides"
        with self.refusals():
            notice, seconds = self._publish(version)
        tally = sent_tally(notice["size_bytes"], seconds)
        tally.total("sync/fallbacks", 0)
        return notice, tally

    def bring_up(self, actor: Any, to_score: Sequences = ()) -> list[LoadReport] | None:
        """Bring an engine that was started again to the version pushed last; returns its report of that. Without a push it starts
        from the right weights, and has nothing to report. to_score: see VLLMEngine.load_weights.

        None: that version is nowhere any more (nccl, after a training step began); the next `push` brings it.
        Raises EngineLost, WeightLoadError, TransferFailed: the engine is of no use, and another has to be started.
        """
        if not self._was_pushed:
            return []
        if self._notice is None and self.trainers.weights_moved:
            return None
        version = self.version

        def load(update: dict[str, Any]) -> list[Any]:
            return self.get([actor.load_weights.remote(version, update, "recompute", to_score)], LOADING)

        if self.method == "nccl":
            self._connect([actor])
            self._connected = []  # the next push makes the group of all
            return self._broadcast(version, load)[1]
        if self._notice is None:  # the last push was a broadcast
            self._publish(version)
        assert self._notice is not None
        return load(self._notice)

    def probe_weights(self, version: int, prompts: list[Prompt], sampling: Sampling) -> Tally:
        """As the function `prove`."""
        return probe_weights(self.trainers, self.rollouts, version, prompts, sampling, self.config)

    def _push(self, version: int, tally: Tally) -> None:
        if self.method == "nccl" and self.rollouts.in_flight == "drain":
            self.rollouts.drain()  # a broadcast that has begun would break off, were it kept waiting for as long as that
        self._connect_all()
        started = time.monotonic()
        if self.method == "nccl":
            self.version, self._was_pushed, self._notice = version, True, None
            sent, reports = self._broadcast(version, lambda update: self.rollouts.load_weights(version, update))
            publish_seconds = sent["seconds"]
        else:
            sent, publish_seconds = self._publish(version)
            reports = self.rollouts.load_weights(version, sent)
        tally.merge(sent_tally(sent["size_bytes"], publish_seconds))
        tally.merge(taken_tally(reports))
        tally.add("sync/gigabytes_per_second", sent["size_bytes"] / 1e9, time.monotonic() - started)

    def _publish(self, version: int) -> tuple[dict[str, Any], float]:
        """Have the trainer write its weights to where engines take them; the notice that they load them by, and the seconds.

        Raises TransferFailed: the system did not let it, as on a full disk.
        """
        started = time.monotonic()
        try:
            notice = self.get(self.trainers.begin_publish(version, self.method), PUBLISHING)[0]
        except OSError as error:
            raise TransferFailed(f"the weights could not be written: {message_of(error)}") from error
        self.version, self._was_pushed, self._notice = version, True, notice
        return notice, time.monotonic() - started

    def _broadcast(self, version: int, load: Callable[[dict[str, Any]], list[Any]]) -> tuple[dict[str, Any], list[Any]]:
        """Trainers send while engines receive. Returns what the sender says and what `load` returns; raises what both say."""
        sending = self.trainers.begin_publish(version, "nccl")
        try:
            reports = load({"version": version})
        except (WeightLoadError, EngineLost) as error:
            try:
                self.get(sending, SENDING)
            except TransferFailed as sender:
                if isinstance(error, WeightLoadError):
                    raise TransferFailed(f"{message_of(error)}; the sender: {message_of(sender)}") from error
            raise
        return self.get(sending, SENDING)[0], reports

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Inside, weights that could not be written, or were refused by an engine while training went on, become a SyncError
        with the way out."""
        try:
            yield
        except REFUSALS as error:
            self._fall_back(error)
            raise  # _fall_back raises in overlap mode, the only one that comes here

    def _connect_all(self) -> None:
        if self.method == "nccl":
            self.rollouts.wait_for_one()
            if self._connected != self.rollouts.actors:
                self._connect(list(self.rollouts.actors))

    def _connect(self, actors: list[Any]) -> None:
        """A new group of trainer rank 0 and these engines. All are heard out: when one dies or stands still, the others complain
        first.

        Raises EngineLost, TrainerLost; TransferFailed, WeightLoadError: it did not come together though nobody was lost.
        """
        self._connected, self._joined = [], actors
        first, workers = self.trainers.actors[0], self.config.rollout.tensor_parallel_size
        (offer,) = self.get([first.offer_transfer.remote(self.config.sync.bucket_mib)], JOINING)
        size = 1 + workers * len(actors)
        timeout_seconds = self.config.failures.stall_seconds / 2  # before the watchdog takes those who wait for lost
        join_seconds = min(JOIN_SECONDS, timeout_seconds)
        told = {**offer, "size": size, "timeout_seconds": timeout_seconds, "join_seconds": join_seconds}
        # Rank 0 first: torch's client of a store whose server is frozen waits for as long as that is.
        joining = [first.join_transfer.remote(offer, size, timeout_seconds, join_seconds)]
        joining += [a.join_transfer.remote({**told, "first_rank": 1 + workers * i}) for i, a in enumerate(actors)]
        failures: list[Exception] = []
        for call in joining:
            try:
                self.get([call], JOINING)
            except (EngineLost, *REFUSALS) as error:
                failures.append(error)
        if failures:
            raise next((one for one in failures if isinstance(one, EngineLost)), failures[0])
        self._connected = actors

    def _until_it_works(self, attempt: Callable[[], None], tally: Tally) -> None:
        """Also when it works at once, sync/fallbacks is counted. Raises SyncError."""
        fallbacks = 0
        while True:
            try:
                attempt()
                break
            except EngineLost:
                self._connected = []
                self.rollouts.wait_a_moment()  # it is replaced; the others are as good as before
            except REFUSALS as error:
                joined, self._connected = self._joined, []
                if self.method == "nccl" and joined != self.rollouts.actors:
                    continue  # an engine was lost, and the group with it; the others are as good as before
                self._fall_back(error)
                fallbacks += 1
        tally.total("sync/fallbacks", fallbacks)

    def _fall_back(self, error: Exception) -> None:
        """Go on with the next method. Raises SyncError: there is none, or the run is in overlap mode."""
        failed, following = self.method, FALL_BACK.get(self.method)
        why = f"sync.method {failed} failed: {message_of(error)}"
        if following is None:
            raise SyncError(
                f"{why}. No method is left; is there room in run.dir, and do all machines see it?"
            ) from error
        if self.config.schedule.mode == "overlap":
            raise SyncError(
                f"{why}. In overlap mode a run does not go on with a slower method by itself: give --resume "
                f"--set sync.method={following}{', or disk where engines are on other machines' if following == 'direct' else ''}."
            ) from error
        self.warn(f"{why}. The run goes on with {following}, which is slower; see docs/running/WEIGHT_SYNC.md")
        self.method = following


def sent_tally(size_bytes: int, seconds: float) -> Tally:
    """What the trainer's side of a sync did."""
    tally = Tally()
    tally.total("sync/bytes", size_bytes)
    tally.total("sync/publish_seconds", seconds)
    return tally


def taken_tally(reports: list[LoadReport]) -> Tally:
    """What taking a version did to generation."""
    tally = Tally()
    for report in reports:
        tally.maximum("sync/pause_seconds", report.pause_seconds)
        tally.maximum("sync/drain_seconds", report.drain_seconds)
    return tally


def probe_weights(
    trainers: TrainerRanks, rollouts: EnginePool, version: int, prompts: list[Prompt], sampling: Sampling,
    config: RLConfig,
) -> Tally:  # fmt: skip
    """Compare engines and trainer on short continuations; also done before the first step.

    Raises:
        ProbeFailed: they disagree by more than the tolerance.
    """
    trajectories = rollouts.probe(prompts, sampling, version)
    budget = config.train.max_tokens_per_micro_batch
    ours = recomputed_columns(trainers, trajectories, ["old_logprobs"], budget, share_prompts=False)
    result = compare([t.behavior_logprobs for t in trajectories], ours["old_logprobs"], tolerance_for(config))
    tally = Tally()
    tally.add("sync/probe_gap_mean", result.mean_gap)
    tally.maximum("sync/probe_gap_max", result.max_gap)
    tally.total("sync/proofs", len(trajectories) / len(prompts))
    return tally
