"""Overlap, partial rollouts, reuse and resumption on the shared stack: whole jobs, a few real steps each."""

from __future__ import annotations

import io
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from data_feeds.prompts.sampler import ShuffledPrompts
from orchestration.cluster.watchdog import Call, EnginesLost
from orchestration.metrics.tally import Tally
from orchestration.rl.loop import drive
from orchestration.rl.weight_probe import ProbeFailed
from orchestration.rl.weight_sync import SyncError
from orchestration.run.checksums import read_marker
from orchestration.run.console import Console
from orchestration.run.directory import checkpoints, read_metrics, state_folder
from orchestration.run.resume import newest_resumable, restore_run
from orchestration.run.samples import read_samples, sample_steps
from unit_tests.e2e.shared_stack import Done, SharedStack, variant

pytestmark = pytest.mark.e2e

OVERLAP = {"mode": "overlap", "max_staleness": 1}
TRAIN = {"steps": 4, "updates_per_step": 1}


def groups_of(done: Done, step: int) -> set[str]:
    return {sample["group"] for sample in read_samples(done.path, step)}


def check_bounded(done: Done, staleness: int = 1) -> None:
    """Every step has a full batch of groups that no other step has, none of them too old, and the weights are proven."""
    asked, steps = done.config.rollout.prompts_per_step, done.config.train.steps
    seen = [groups_of(done, step) for step in range(1, steps + 1)]
    assert all(len(groups) == asked for groups in seen) and len(set().union(*seen)) == asked * steps
    for row in done.rows[1:]:
        assert row["train/staleness_max"] <= staleness
        shares = [row[f"schedule/staleness/{age}"] for age in range(staleness + 1)]
        assert sum(shares) == pytest.approx(1), shares
        assert row["objective/correction_weight"] > 0, "off-policy by default, and visible"
    assert max(row["sync/probe_gap_max"] for row in done.rows[2:]) < 1e-3, (
        "each version is proven by the next step's end"
    )
    assert done.rows[-1]["schedule/running_groups"] == done.rows[-1]["schedule/ready_groups"] == 0, (
        "nothing to throw away"
    )
    assert done.weights[0] != done.weights[-1]


@pytest.mark.parametrize("in_flight", ["recompute", "drain", variant("keep_cache"), variant("abort")])
def test_overlap_trains_on_tokens_of_bounded_age(stack: SharedStack, in_flight: str) -> None:
    """Alone catches overlap that trains on tokens older than allowed, or that does not overlap at all."""
    done = stack.run({"schedule": {**OVERLAP, "in_flight": in_flight}, "train": TRAIN})
    check_bounded(done)
    assert done.rows[2]["schedule/staleness/1"] > 0, "the second batch was asked while the first was trained on"


def test_partial_rollouts_on_shared_devices(stack: SharedStack) -> None:
    """Alone catches what was requested ahead and is lost while engines stand still for the trainer."""
    schedule = {**OVERLAP, "pause_while_training": True, "over_issue": 0.5, "in_flight": "abort"}
    done = stack.run({"schedule": schedule, "train": TRAIN})
    check_bounded(done)
    assert sum(row["schedule/engine_paused_seconds"] for row in done.rows[1:]) > 0
    assert all(row["schedule/running_groups"] + row["schedule/ready_groups"] <= 4 for row in done.rows[1:])


def test_groups_are_reused_as_often_as_the_configuration_says(stack: SharedStack) -> None:
    """Alone catches groups that the replay buffer gives too often, or without generating fewer."""
    done = stack.run({"schedule": {"replay_buffer_versions": 1, "replay_buffer_share": 0.25}, "train": TRAIN})
    assert [len(groups_of(done, step)) for step in range(1, 5)] == [6] * 4, "a quarter of eight is not generated"
    assert all(row["schedule/replayed_share"] == 0.25 for row in done.rows[2:])
    assert all(row["train/staleness_max"] == 1 for row in done.rows[2:])


@pytest.mark.parametrize("schedule", [{}, OVERLAP], ids=["sync", "overlap"])
def test_a_stopped_job_goes_on(stack: SharedStack, schedule: dict[str, Any]) -> None:
    """Alone catches a resumption with other numbers (sync), or that loses prompts which were under way (overlap)."""
    job = {"schedule": schedule, "train": TRAIN, "checkpoint": {"every": 1}, "eval": {"every": 2}}
    half = stack.run(job, stop_after=2)
    older, newest = checkpoints(half.path)
    assert state_folder(older).exists() and state_folder(newest).exists(), "two can be resumed from"
    again = stack.run(job, resume=newest)
    assert [row["step"] for row in again.rows] == [3, 4]
    expected = ShuffledPrompts(stack.prompts(half.config), half.config.run.seed).next(4 * 8)
    asked = [prompt for step in (1, 2) for prompt in prompts_of(half, step)]
    asked += [prompt for step in (3, 4) for prompt in prompts_of(again, step)]
    assert sorted(asked) == sorted(prompt.prompt_id for prompt in expected), "no prompt was lost, and none asked twice"
    if not schedule:
        whole = stack.run(job)
        for row, other in zip(whole.rows[3:], again.rows, strict=True):
            timed = {
                name for name in row if name.startswith("time/") or "per_second" in name or name.endswith("_seconds")
            }
            for name in row.keys() - timed:
                assert row[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name
        assert whole.weights[-1] == again.weights[-1], "the same bits"


def test_a_version_that_did_not_arrive_is_noticed_while_training_goes_on(stack: SharedStack) -> None:
    """Alone catches old weights under a new version's name, beside training."""
    with stack.job({"schedule": OVERLAP, "train": {**TRAIN, "learning_rate": 0.01}}) as job:
        assert job.driver.syncs_in_flight
        batch = job.generate()
        old = job.driver.watch.wait(job.trainers.publish(1))
        job.train(1, batch)
        job.driver.weights.publish = lambda version: (old, Tally())  # type: ignore[method-assign]
        with pytest.raises(ProbeFailed, match="mean gap"):
            job.sync(batch)
            job.driver.settle()


@pytest.mark.parametrize(
    ("loss", "while_training"),
    [(EnginesLost, True), (SyncError, False), variant(EnginesLost, False), variant(SyncError, True)],
)
def test_when_engines_are_lost_for_good_a_whole_step_is_kept(
    stack: SharedStack, loss: type[Exception], while_training: bool
) -> None:
    """Alone catches a batch or a prompt that is lost with the engines, or a checkpoint in the middle of a step."""
    block = {"schedule": OVERLAP, "train": TRAIN}
    with stack.job(block) as job:
        go_round = job.driver.go_round

        def lose(wait_seconds: float, submits: bool = True) -> None:
            is_waited_for = wait_seconds > 0
            if (
                job.progress.trained_steps == 2
                and job.driver.queue.next_step == (4 if while_training else 3)
                and submits
                and is_waited_for != while_training
            ):
                raise loss("all of them")
            go_round(wait_seconds, submits)

        job.driver.go_round = lose  # type: ignore[method-assign]
        with pytest.raises(loss, match=r"all of them\.? Go on from .* with --resume"):
            drive(job, lambda path: path)
        (kept,) = checkpoints(job.run.path)
        done = 3 if while_training else 2
        assert read_marker(kept)["step"] == done
    again = stack.run(block, resume=kept)
    asked = [prompt for step in range(1, done + 1) for prompt in prompts_of_run(job.run.path, step)]
    asked += [prompt for step in range(done + 1, 5) for prompt in prompts_of(again, step)]
    assert len(asked) == len(set(asked)) == 32


def test_an_engine_that_is_started_again_proves_what_it_was_given(stack: SharedStack) -> None:
    """Alone catches weights that an engine takes beside training and that nobody compares."""
    pool = stack.actors.pool
    (engine,) = pool.engines
    with stack.job({"schedule": OVERLAP, "train": TRAIN}) as job:
        driver = job.driver

        def look(path: Path) -> Path:
            if job.progress.trained_steps == 2:
                driver.settle()
                for shift in (0.0, 1.0):
                    assert pool.weights is not None and pool.weights.update is not None and pool.weights.to_score
                    engine.load(pool.weights.version, pool.weights.update, pool.in_flight, pool.weights.to_score)
                    assert driver._expected is not None and not driver.is_settled
                    expected, driver._expected = driver._expected, [one + shift for one in driver._expected]
                    with pytest.raises(ProbeFailed, match="mean gap 1 nats") if shift else nullcontext():
                        driver.settle()
                    driver._expected = expected
                    assert driver.is_settled
            return path

        drive(job, look)
    probes = sum(row.get("sync/probes", 0) for row in read_metrics(job.run.path))
    assert probes == 6, "the first one, one a step, and one of the engine that took them again"


def test_a_refusal_that_is_met_while_a_checkpoint_is_written_ends_the_run_after_it(stack: SharedStack) -> None:
    """Alone catches a wait for engines that refused, and make nothing any more."""
    with stack.job({"schedule": OVERLAP, "train": TRAIN, "checkpoint": {"every": 1}}) as job:
        go_round, save = job.driver.go_round, job.trainers.save
        is_saving: list[bool] = []

        def lose(wait_seconds: float, submits: bool = True) -> None:
            if is_saving:
                raise SyncError("engine 0 refused them.")
            go_round(wait_seconds, submits)

        def slowly(folder: Path) -> Call[list[Any]]:
            if job.progress.trained_steps == 2:
                is_saving.append(True)
                job.driver.go_round_beside()  # as while ranks write
                is_saving.clear()
            return save(folder)

        job.driver.go_round, job.trainers.save = lose, slowly  # type: ignore[method-assign]
        with pytest.raises(SyncError, match=r"refused them\. Go on from .*step_000002 with --resume"):
            drive(job, lambda path: path)
        job.trainers.save = save  # type: ignore[method-assign]
        assert job.progress.trained_steps == 2 and job.driver.queue.next_step == 3, "no third batch was taken"


@pytest.mark.parametrize(("schedule", "step"), [({}, 2), (OVERLAP, 4), variant({}, 4), variant(OVERLAP, 2)])
def test_an_evaluation_in_which_engines_were_lost_for_good_is_made_up_for(
    stack: SharedStack, schedule: dict[str, Any], step: int
) -> None:
    """Alone catches a step without its line, or an accuracy that is missing after a resumption."""
    block = {"schedule": schedule, "train": TRAIN, "eval": {"every": 2}}
    with stack.job(block) as job:
        evaluate = job.evaluate

        def lose(at: int) -> None:
            if at == step:
                job.driver.settle()  # as before every evaluation
                raise EnginesLost("all of them")
            evaluate(at)

        job.evaluate = lose  # type: ignore[method-assign]
        with pytest.raises(EnginesLost):
            drive(job, lambda path: path)
    run, config = job.run, job.config
    assert [row["step"] for row in read_metrics(run.path)] == list(range(step))
    kept = newest_resumable(run)
    assert kept is not None
    for _ in range(2):  # the second time as if it had been killed before its next checkpoint
        restore_run(run, kept, config)
        with Console("again", config.train.steps, io.StringIO()) as console:
            again = stack.begun(config, run, console)
            again.resume(kept)
        rows = read_metrics(run.path)
        assert [row["step"] for row in rows] == list(range(step + 1))
        assert {"eval/accuracy", "train/tokens", "time/eval_seconds"} <= rows[-1].keys()
        assert again.progress.accuracies == [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    drive(again, lambda path: path)
    rows = read_metrics(run.path)
    assert [row["step"] for row in rows if "eval/accuracy" in row] == sample_steps(run.path, heldout=True) == [0, 2, 4]
    assert [row["step"] for row in rows] == sorted([0, *sample_steps(run.path)]) == list(range(5))
    if not schedule:
        whole = stack.run(block)
        for name in ("eval/accuracy", "eval/reward", "train/loss"):
            assert [r.get(name) for r in rows] == [pytest.approx(r[name]) if name in r else None for r in whole.rows]


def prompts_of_run(folder: Path, step: int) -> set[str]:
    return {sample["prompt_id"] for sample in read_samples(folder, step)}


def prompts_of(done: Done, step: int) -> set[str]:
    return prompts_of_run(done.path, step)
