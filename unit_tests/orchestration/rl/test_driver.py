"""What a round of the driver does, and what becomes of a failure while the trainer works. The pool answers from a script."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from orchestration.cluster.watchdog import Call, EnginesLost, Waiting
from orchestration.engines.requests import step_requests
from orchestration.rl.driver import Driver
from orchestration.rl.weight_probe import ProbeFailed
from orchestration.rl.weight_sync import SyncError
from orchestration.run.interruption import Interrupted
from records.rollout import Group, Prompt
from rollouts.vllm.engine import LoadReport
from rollouts.vllm.sampling import Sampling
from unit_tests.orchestration.rl.scripted_queue import OVERLAP, SAMPLES, ScriptedPool, job, queue_of


class LoadingPool(ScriptedPool):
    """Also takes weights: the reports of its engines come when the test says so."""

    sleeps = is_loading = False

    def __init__(self) -> None:
        super().__init__(lambda prompt, number: 1, hold=True)
        self.reports: list[LoadReport] = []
        self.error: Exception | None = None

    @property
    def has_reports(self) -> bool:
        return bool(self.reports)

    def take_reports(self) -> list[LoadReport]:
        reports, self.reports = self.reports, []
        return reports

    def collect(self, wait_seconds: float) -> list[Group]:
        if self.error is not None:
            raise self.error
        ready, self._ready = self._ready, []
        return ready


def driver_of(mode: str = "overlap") -> tuple[Driver, LoadingPool]:
    schedule = OVERLAP if mode == "overlap" else {}
    queue, _, _ = queue_of(lambda prompt, number: 1, [], schedule=schedule)
    pool = LoadingPool()
    queue.pool = pool  # type: ignore[assignment]
    weights = SimpleNamespace(version=0, refusals=contextlib.nullcontext, give_to_new_engines=lambda: None)
    config = job([], schedule=schedule)
    return Driver(config, None, pool, queue, weights, None), pool  # type: ignore[arg-type]


class Trainer:
    """A call of trainer ranks that ends after some looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, looks: int) -> None:
        self.looks = looks
        monkeypatch.setattr(Waiting, "is_over", self.is_over)

    def is_over(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    call: Call[Any] = Call([], "train", lambda _: "trained")


@pytest.mark.parametrize(("mode", "submitted"), [("overlap", 8), ("sync", 0)])
def test_engines_are_kept_at_work_beside_the_trainer_in_overlap_only(
    monkeypatch: pytest.MonkeyPatch, mode: str, submitted: int
) -> None:
    driver, pool = driver_of(mode)
    trainer = Trainer(monkeypatch, looks=3)
    assert driver.wait(trainer.call) == "trained" and pool.group_ids == [], (
        "nothing is submitted before the first probe"
    )
    driver.begin_overlap()
    trainer.looks = 3
    assert driver.wait(trainer.call) == "trained"
    assert len(pool.group_ids) == submitted


@pytest.mark.parametrize("error", [EnginesLost("all are gone"), SyncError("refused")])
def test_what_fails_beside_the_trainer_is_raised_when_its_step_is_whole(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    driver, pool = driver_of()
    driver.begin_overlap()
    driver.raise_failure()
    pool.error = error
    assert driver.wait(Trainer(monkeypatch, looks=3).call) == "trained"
    with pytest.raises(type(error), match=str(error)):
        driver.raise_failure()
    pool.error = ValueError("no round is gone any more")
    assert driver.wait(Trainer(monkeypatch, looks=3).call) == "trained"


def test_an_error_of_ours_beside_the_trainer_is_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, pool = driver_of()
    driver.begin_overlap()
    pool.error = ValueError("a filter failed")
    with pytest.raises(ValueError, match="a filter failed"):
        driver.wait(Trainer(monkeypatch, looks=3).call)


def test_the_wait_for_a_batch_is_counted_and_what_was_left_is_not_waited_for() -> None:
    driver, pool = driver_of()
    collect = pool.collect

    def late(wait_seconds: float) -> list[Group]:
        time.sleep(0.05)
        pool.finish(*(group.group_id for group in pool._held))
        return collect(wait_seconds)

    pool.collect = late  # type: ignore[method-assign]
    assert len(driver.next_batch(0).fresh) == 4
    assert driver.tally.means()["schedule/trainer_wait_seconds"] >= 0.05
    before = driver.tally.means()["schedule/trainer_wait_seconds"]
    driver.queue.trained(0)
    assert len(driver.next_batch(0).fresh) == 4
    assert driver.tally.means()["schedule/trainer_wait_seconds"] < before + 0.05, "four had been left"


def test_an_evaluation_gets_its_own_groups_and_training_keeps_the_others() -> None:
    driver, pool = driver_of()
    driver.go_round(0.0)
    trained = list(pool.group_ids)
    prompts = [Prompt(f"e/{i}", []) for i in range(2)]
    requests = step_requests(prompts, SAMPLES, Sampling(max_new_tokens=8), 1, "heldout")
    collect = pool.collect

    def all_finish(wait_seconds: float) -> list[Group]:
        pool.finish(*(group.group_id for group in pool._held))
        return collect(wait_seconds)

    pool.collect = all_finish  # type: ignore[method-assign]
    groups = driver.generate(requests)
    assert [group.group_id for group in groups] == ["heldout-1-0", "heldout-1-1"]
    assert driver.queue.admission.ready == len(trained) == 8, "nothing was lost, and nothing more was submitted"


def test_weights_that_were_taken_beside_training_are_checked() -> None:
    driver, pool = driver_of()
    driver._expected, pool.is_loading = [np.array([-1.0, -2.0], np.float32)], True
    assert not driver.is_settled
    driver.go_round(0.0)
    assert "sync/probes" not in driver.tally.means()
    right = LoadReport(0.1, 0.0, 0, 0, [np.array([-1.0, -2.001], np.float32)])
    pool.is_loading, pool.reports = False, [right, right]
    assert not driver.is_settled
    driver.settle()
    assert driver.tally.means()["sync/probes"] == 2 and driver.is_settled
    pool.reports = [LoadReport(0.1, 0.0, 0, 0, [np.array([-3.0, -2.0], np.float32)])]
    with pytest.raises(ProbeFailed, match="disagree"):
        driver.go_round(0.0)


def test_a_run_that_is_asked_to_end_lets_the_trainer_finish() -> None:
    driver, _ = driver_of()
    driver.begin_overlap()
    driver.asked = lambda: True
    driver.go_round_beside()
    assert isinstance(driver.failure, Interrupted), "kept while the trainer works"
    with pytest.raises(Interrupted):
        driver.raise_failure()
    with pytest.raises(Interrupted):
        driver.next_batch(0)
