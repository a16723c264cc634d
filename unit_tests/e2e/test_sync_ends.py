"""A run in overlap whose sync method fails ends with a checkpoint, from which it goes on by another method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from configs.blocks.rl import RLConfig
from configs.reading.load import ConfigError, load
from orchestration.cluster.watchdog import Call
from orchestration.rl import weight_sync
from orchestration.rl.loop import drive
from orchestration.rl.weight_sync import SyncError
from orchestration.run.checksums import read_marker
from orchestration.run.directory import CONFIG, checkpoints
from orchestration.run.resume import opened_to_resume
from orchestration.run.samples import sample_steps
from unit_tests.e2e.shared_stack import RANKS, SharedStack
from unit_tests.e2e.test_schedule import OVERLAP, TRAIN, prompts_of, prompts_of_run
from unit_tests.e2e.test_sync_methods import PUBLISHING, unreachable, unreadable

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("method", "instead", "step", "spoils", "change"),
    [
        ("nccl", "direct", 1, weight_sync.JOINING, unreachable),
        ("direct", "disk", 2, PUBLISHING, unreadable),  # noticed while the trainer trains on
    ],
    ids=["nccl", "direct"],
)
def test_a_run_that_its_sync_method_ended_goes_on_by_another(
    stack: SharedStack, monkeypatch: pytest.MonkeyPatch, method: str, instead: str, step: int, spoils: str,
    change: Callable[[dict[str, Any]], None],
) -> None:  # fmt: skip
    """Alone catches a way out of a failed sync that the error names and that does not work."""
    block = {"schedule": OVERLAP, "train": TRAIN, "sync": {"method": method}}
    monkeypatch.setattr(weight_sync, "JOIN_SECONDS", 2.0)
    with stack.job(block) as job:
        wait = job.driver.watch.wait

        def spoilt(call: Call[Any]) -> Any:
            answer = wait(call)
            if job.progress.trained_steps == step and call.doing.startswith(spoils):
                said = answer[0] if isinstance(answer, list) else answer
                if isinstance(said, dict):
                    change(said)
            return answer

        monkeypatch.setattr(job.driver.watch, "wait", spoilt)
        way_out = rf"give --resume --set sync\.method={instead}.* Go on from .*step_00000\d with --resume\."
        with pytest.raises(SyncError, match=way_out):
            drive(job, lambda path: path)
        monkeypatch.undo()
        # The engine is used by what comes, and groups wait for version 2.
        job.pool.load_weights(9, job.driver.watch.wait(job.trainers.publish(9)))
    (kept,) = checkpoints(job.run.path)
    done = read_marker(kept)["step"]
    assert step <= done <= step + 1 and sample_steps(job.run.path) == list(range(1, done + 1))
    config = load(job.run.path / CONFIG, RLConfig, [f"sync.method={instead}"], str(job.run.path))
    assert opened_to_resume(config, RANKS).resumed_from == kept
    with pytest.raises(ConfigError, match=r"differs from .* in schedule\.mode,"):
        opened_to_resume(load(job.run.path / CONFIG, RLConfig, ["schedule.mode=sync"], str(job.run.path)), RANKS)
    again = stack.run({**block, "sync": {"method": instead}}, resume=kept)
    asked = [prompt for at in range(1, done + 1) for prompt in prompts_of_run(job.run.path, at)]
    asked += [prompt for at in range(done + 1, 5) for prompt in prompts_of(again, at)]
    assert len(asked) == len(set(asked)) == 32, "no prompt was lost, and none asked twice"
