"""Weight sync: publish the trainer's weights and load them into every engine. The probe checks whether it worked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from configs.blocks.rl import RLConfig
from configs.blocks.sync import SyncMethod
from orchestration.cluster.watchdog import EngineLost, Watch
from orchestration.engines.handle import EngineHandle, message_of
from orchestration.engines.pool import MOMENT_SECONDS, CurrentWeights, EnginePool
from orchestration.metrics.tally import Tally
from orchestration.trainer.ranks import TrainerRanks
from rollouts.vllm.engine import LoadReport, WeightLoadError
from rollouts.vllm.weight_broadcast import TransferFailed

FALL_BACK: dict[SyncMethod, SyncMethod] = {"nccl": "direct", "direct": "disk"}
JOIN_SECONDS = 120.0  # for a group to come together; NCCL's first connection between machines takes tens of seconds
JOINING = "joining the weight group"
LOADING = "loading weights into a new engine"
REFUSALS = (WeightLoadError, TransferFailed)  # what a method may fail with; anything else is a fault and ends the run


class SyncError(RuntimeError):
    """The error of engines that could not be brought to the trainer's weights."""


class WeightSync:
    """Bring engines to the trainer's weights, version after version, by the configured method or the next that works.

    With nccl the engines and trainer rank 0 are in a group, which is made again whenever the engines have changed.
    """

    def __init__(
        self, config: RLConfig, trainers: TrainerRanks, pool: EnginePool, watch: Watch, warn: Callable[[str], None]
    ) -> None:
        """Begin at version 0. warn: shows a sentence to the user."""
        self.config, self.trainers, self.pool, self.watch, self.warn = config, trainers, pool, watch, warn
        self.method: SyncMethod = config.sync.method
        self._connected: list[Any] = []  # the engines' actors in the group
        self._joined: list[Any] = []  # those that were to be in the last one, whether or not it came together
        self.version = 0  # that was pushed last: engines hold it, or it is on its way to them

    def push(self, version: int) -> Tally:
        """Publish the trainer's weights as `version` and load them into all engines; all of them hold it afterwards.

        Raises:
            SyncError: it failed, in overlap mode or by every method that was left.
            EnginesLost: engines died, and no more may be replaced.
        """
        tally = Tally()
        self._until_it_works(lambda: self._push(version, tally), tally)
        return tally

    def publish(self, version: int) -> tuple[dict[str, Any], Tally]:
        """Do the first half of `push`, for methods that store a version from which engines can load it later. Return
        the notice by which engines load it. Raise SyncError when the weights could not be written."""
        assert self.method != "nccl", "a broadcast takes both sides"
        with self.refusals():
            notice, seconds = self._publish(version)
        tally = sent_tally(notice["size_bytes"], seconds)
        tally.total("sync/fallbacks", 0)
        return notice, tally

    def give_to_new_engines(self) -> None:
        """Bring engines that were started again to the version pushed last, if that was broadcast and is in no file.

        When the trainer has trained since then, that version exists nowhere any more; they get the next one.
        """
        for engine in self.pool.without_weights:
            if self.trainers.weights_moved:
                return
            try:
                self._give_to(engine)
            except (WeightLoadError, TransferFailed) as error:
                self.pool.replace(engine, engine.lost_without_weights(error))
            except EngineLost as lost:
                self.pool.replace(engine, lost)

    def _give_to(self, engine: EngineHandle) -> None:
        version = self.version
        if self.method != "nccl":  # it fell back meanwhile: the pool gives what a file holds
            notice, _ = self._publish(version)
            self.pool.weights = CurrentWeights(version, notice)
            return

        def load(update: dict[str, Any]) -> list[LoadReport]:
            return self.watch.get([engine.actor.load_weights.remote(version, update)], LOADING)

        self._connect([engine.actor])
        self._connected = []  # the next push makes the group of all
        self._broadcast(version, load)
        engine.use()

    def _push(self, version: int, tally: Tally) -> None:
        if self.method == "nccl" and self.pool.in_flight == "drain":
            self.pool.drain()  # a broadcast that has begun would break off, were it kept waiting for as long as that
        self._connect_all()
        started = time.monotonic()
        if self.method == "nccl":
            self.version = version
            sent, reports = self._broadcast(version, partial(self.pool.load_weights, version, stays=False))
            publish_seconds = sent["seconds"]
        else:
            sent, publish_seconds = self._publish(version)
            reports = self.pool.load_weights(version, sent)
        tally.merge(sent_tally(sent["size_bytes"], publish_seconds))
        tally.merge(taken_tally(reports))
        tally.add("sync/gigabytes_per_second", sent["size_bytes"] / 1e9, time.monotonic() - started)

    def _publish(self, version: int) -> tuple[dict[str, Any], float]:
        """Let the trainer write its weights to where engines load them; return the notice for engines, and the seconds.

        Raises:
            TransferFailed: the system refused, for example because the disk is full.
        """
        started = time.monotonic()
        try:
            notice = self.watch.wait(self.trainers.publish(version, self.method))
        except OSError as error:
            raise TransferFailed(f"the weights could not be written: {message_of(error)}") from error
        self.version = version
        return notice, time.monotonic() - started

    def _broadcast(
        self, version: int, load: Callable[[dict[str, Any]], list[LoadReport]]
    ) -> tuple[dict[str, Any], list[LoadReport]]:
        """Let trainers send while engines receive. Return both results; an error holds what both sides said."""
        sending = self.trainers.publish(version, "nccl")
        try:
            reports = load({"version": version})
        except (WeightLoadError, EngineLost) as error:
            try:
                self.watch.wait(sending)
            except TransferFailed as sender:
                if isinstance(error, WeightLoadError):
                    raise TransferFailed(f"{message_of(error)}; the sender: {message_of(sender)}") from error
            raise
        return self.watch.wait(sending), reports

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Turn the error of weights that were not written, or that an engine refused during training, into a SyncError
        that names the remedy."""
        try:
            yield
        except REFUSALS as error:
            self._fall_back(error)
            raise  # _fall_back raises in overlap mode, the only one that comes here

    def _connect_all(self) -> None:
        if self.method == "nccl":
            self.pool.wait_for_one()
            if self._connected != self.pool.actors:
                self._connect(list(self.pool.actors))

    def _connect(self, actors: list[Any]) -> None:
        """Make a new group of trainer rank 0 and these engines. Wait for the answers of all: when one dies or stands
        still, the others complain first.

        Raises:
            EngineLost, TrainerLost: one of them is lost.
            TransferFailed, WeightLoadError: the group did not form although none was lost.
        """
        self._connected, self._joined = [], actors
        first, workers = self.trainers.actors[0], self.config.rollout.tensor_parallel_size
        (offer,) = self.watch.get([first.offer_transfer.remote(self.config.sync.bucket_mib)], JOINING)
        size = 1 + workers * len(actors)
        timeout_seconds = self.config.failures.stall_seconds / 2  # before the watchdog takes those who wait for lost
        join_seconds = min(JOIN_SECONDS, timeout_seconds)
        group = {**offer, "size": size, "timeout_seconds": timeout_seconds, "join_seconds": join_seconds}
        # Rank 0 first: torch's client of a store whose server is frozen waits for as long as that is.
        joining = [first.join_transfer.remote(offer, size, timeout_seconds, join_seconds)]
        joining += [a.join_transfer.remote({**group, "first_rank": 1 + workers * i}) for i, a in enumerate(actors)]
        failures: list[Exception] = []
        for call in joining:
            try:
                self.watch.get([call], JOINING)
            except (EngineLost, *REFUSALS) as error:
                failures.append(error)
        if failures:
            raise next((one for one in failures if isinstance(one, EngineLost)), failures[0])
        self._connected = actors

    def _until_it_works(self, attempt: Callable[[], None], tally: Tally) -> None:
        """Repeat an attempt, by the next method when one fails; count failed methods. Raise SyncError when none is
        left."""
        fallbacks = 0
        while True:
            try:
                attempt()
                break
            except EngineLost:
                self._connected = []
                self.pool.look(MOMENT_SECONDS, gives_weights=False)  # it is replaced; the others are as good as before
            except REFUSALS as error:
                joined, self._connected = self._joined, []
                if self.method == "nccl" and joined != self.pool.actors:
                    continue  # an engine was lost, and the group with it; the others are as good as before
                self._fall_back(error)
                fallbacks += 1
        tally.total("sync/fallbacks", fallbacks)

    def _fall_back(self, error: Exception) -> None:
        """Switch to the next method. Raise SyncError when there is none, or the run is in overlap mode."""
        failed, following = self.method, FALL_BACK.get(self.method)
        why = f"sync.method {failed} failed: {message_of(error)}"
        if following is None:
            raise SyncError(
                f"{why}. No method is left; is there room in run.dir, and do all machines see it?"
            ) from error
        if self.config.schedule.mode == "overlap":
            elsewhere = ", or disk where engines are on other machines" if following == "direct" else ""
            raise SyncError(
                f"{why}. In overlap mode a run does not go on with a slower method by itself: give --resume "
                f"--set sync.method={following}{elsewhere}."
            ) from error
        self.warn(f"{why}. The run goes on with {following}, which is slower; see docs/running/WEIGHT_SYNC.md")
        self.method = following


def sent_tally(size_bytes: int, seconds: float) -> Tally:
    """Return the metrics of the trainer's side of a sync."""
    tally = Tally()
    tally.total("sync/bytes", size_bytes)
    tally.total("sync/publish_seconds", seconds)
    return tally


def taken_tally(reports: list[LoadReport]) -> Tally:
    """Return the metrics of how loading a version interrupted generation."""
    tally = Tally()
    for report in reports:
        tally.maximum("sync/pause_seconds", report.pause_seconds)
        tally.maximum("sync/drain_seconds", report.drain_seconds)
        tally.maximum("sync/read_back_seconds", report.read_back.seconds)
        tally.maximum("sync/unread_share", report.read_back.unread_share)
    return tally
