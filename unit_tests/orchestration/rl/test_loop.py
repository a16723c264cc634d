"""What is said when a trainer rank was lost once too often: which limit it was, and how to go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.blocks.rl import RLConfig
from configs.reading.load import load, to_yaml
from data_feeds.prompts.prompts import PromptSets
from orchestration.cluster.watchdog import TrainerLost
from orchestration.rl import loop
from orchestration.run.directory import RunDirectory
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
