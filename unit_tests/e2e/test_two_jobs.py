"""Two jobs begun at the same moment on one machine do not meet: not in Ray, not in ports, not in shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestration.run.directory import checkpoints, read_metrics
from unit_tests.e2e.test_grpo_tiny import ending, marked_processes, started_rl

pytestmark = [pytest.mark.e2e]
SMALL = (
    "train.steps=2",
    "rollout.prompts_per_step=4",
    "rollout.responses_per_prompt=4",
    "eval.every=0",
    "eval.max_prompts=2",
)


def test_both_finish(tiny_model: Path, tmp_path: Path) -> None:
    runs = [tmp_path / "one", tmp_path / "other"]
    with (
        ending(started_rl(runs[0], tiny_model, *SMALL)) as one,
        ending(started_rl(runs[1], tiny_model, *SMALL)) as other,
    ):
        for process in (one, other):
            printed, errors = process.communicate(timeout=280)
            assert process.returncode == 0, printed + errors
    for run in runs:
        rows = read_metrics(run)
        assert [row["step"] for row in rows] == [0, 1, 2]
        assert max(row["sync/probe_gap_max"] for row in rows) < 1e-3, "its engine took another job's weights"
        assert [path.name for path in checkpoints(run)] == ["step_000002"]
        assert not marked_processes(run)
