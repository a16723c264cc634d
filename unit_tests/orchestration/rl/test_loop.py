"""What is said when a trainer rank was lost once too often: which limit it was, and how to go on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.blocks.rl import RLConfig
from configs.reading.load import load, to_yaml
from data_feeds.prompts.prompts import PromptSets
from orchestration.cluster.watchdog import TrainerLost
from orchestration.rl import loop
from orchestration.run.directory import RunDirectory
from orchestration.run.interruption import Interrupted
from orchestration.run.resume import DriverState

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("has_checkpoint", "has_state", "how_to_resume"),
    [
        (False, False, "There is no checkpoint to go on from."),
        (True, False, "holds its weights, and no state for --resume (checkpoint.resume_state is false)."),
        (True, True, "Go on from {run}/checkpoints/step_000001 with --resume."),
    ],
)
def test_the_last_loss_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_checkpoint: bool, has_state: bool, how_to_resume: str
) -> None:
    run_dir = tmp_path / "run"
    config = load(ROOT / "configs/grpo_tiny.yaml", RLConfig, ["failures.job_restarts=1"], str(run_dir))
    run, attempts = RunDirectory.create(run_dir, to_yaml(config)), []

    def lose(*given: object) -> None:
        attempts.append(given)
        if has_checkpoint and len(attempts) == 1:
            with run.checkpoint(1) as folder:
                if has_state:
                    DriverState(1, 1, {}, {"train/loss": 0.25}).write(folder)
        raise TrainerLost("trainer rank 1", "died", "train, step 2: trainer rank 1 died")

    monkeypatch.setattr(loop, "attempt", lose)
    with pytest.raises(TrainerLost) as lost:
        loop.run_rl(config, PromptSets([], [], 0, 0, 0), run, lambda path: path)
    said = str(lost.value)
    assert said.startswith("train, step 2: trainer rank 1 died. failures.job_restarts = 1. ")
    assert said.endswith(how_to_resume.format(run=run_dir))
    assert lost.value.name == "trainer rank 1" and lost.value.how == "died"
    assert len(attempts) == (1 if has_checkpoint and not has_state else 2)


@pytest.mark.parametrize("newest", [1, 2])
def test_a_run_that_is_asked_to_end_keeps_what_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newest: int
) -> None:
    """The signal comes while step 3 is generated; step 2 is trained, and has a checkpoint already or gets it now."""
    config = load(ROOT / "configs/grpo_tiny.yaml", RLConfig, [], str(tmp_path / "run"))
    run, calls = RunDirectory.create(tmp_path / "run", to_yaml(config)), []
    with run.checkpoint(newest):
        pass
    driver = SimpleNamespace(asked=None, stop=lambda: calls.append("stop"))
    progress = SimpleNamespace(first_step=3, trained_steps=2)
    job = SimpleNamespace(run=run, config=config, driver=driver, progress=progress, checkpoint=calls.append)

    def step(job: Any, number: int) -> None:
        assert not job.driver.asked()
        os.kill(os.getpid(), signal.SIGTERM)
        assert job.driver.asked()
        raise Interrupted  # as the driver's next round does

    monkeypatch.setattr(loop, "do_step", step)
    with pytest.raises(KeyboardInterrupt):
        loop.drive(job, lambda path: path)  # type: ignore[arg-type]
    assert calls == (["stop", 2] if newest == 1 else ["stop"])
