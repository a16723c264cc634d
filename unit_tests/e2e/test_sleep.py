"""An engine that is lost asleep is noticed, and one that is lost on the way to sleep takes no batch with it (what sleep does to
responses: test_in_flight)."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from orchestration.cluster.watchdog import EnginesLost
from orchestration.rl.loop import drive
from orchestration.run.checksums import read_marker
from orchestration.run.directory import checkpoints
from unit_tests.e2e.shared_stack import SharedStack
from unit_tests.e2e.test_failures import STALL_SECONDS, core_of, pid_of, quick_to_judge
from unit_tests.e2e.test_schedule import prompts_of, prompts_of_run
from unit_tests.waiting import is_alive, wait_for

pytestmark = pytest.mark.e2e


def test_vllm_frozen_in_its_sleep_is_noticed_when_it_is_to_wake(stack: SharedStack) -> None:
    """Alone catches a loss that looks like the pause it began in."""
    rollouts = stack.actors.pool
    rollouts.restarts_left = 1
    rollouts.tally()
    rollouts.sleep()
    core = core_of(pid_of(rollouts.engines[0].member))
    os.kill(core, signal.SIGSTOP)
    rescue = threading.Timer(6 * STALL_SECONDS, os.kill, (core, signal.SIGCONT))  # so that a failure is no hang
    rescue.start()
    with quick_to_judge(rollouts.watch):
        rollouts.wake()
    rescue.cancel()
    assert rollouts.tally().means().get("rollout/engine_restarts") == 1
    assert "has been in 'wake' for" in rollouts._deaths[-1][1].how
    wait_for(lambda: not is_alive(core), "vLLM's process has ended")


def test_engines_lost_for_good_as_they_go_to_sleep_take_no_batch_with_them(
    stack: SharedStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone catches a batch that was taken before and is not trained on, or a checkpoint without it."""
    block = {
        "schedule": {"mode": "overlap", "pause_while_training": True}, "train": {"steps": 4, "updates_per_step": 1},
    }  # fmt: skip
    with stack.job(block) as job:
        sleep = job.pool.sleep

        def lose_in_the_second_step() -> None:
            if job.progress.trained_steps == 1:
                raise EnginesLost("all of them")
            sleep()

        with monkeypatch.context() as patch:
            patch.setattr(job.pool, "sleep", lose_in_the_second_step)
            with pytest.raises(EnginesLost, match="all of them"):
                drive(job, lambda path: path)
        (kept,) = checkpoints(job.run.path)
        assert read_marker(kept)["step"] == 2
    again = stack.run(block, resume=kept)
    asked = [prompt for step in (1, 2) for prompt in prompts_of_run(job.run.path, step)]
    asked += [prompt for step in (3, 4) for prompt in prompts_of(again, step)]
    assert len(asked) == len(set(asked)) == 32
