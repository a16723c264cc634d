"""A user's command with adapters and overlap, in which an engine and then a trainer rank are killed: it ends well by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from orchestration.run.directory import checkpoints, read_metrics
from orchestration.run.samples import read_samples
from unit_tests.waiting import PATIENCE_SECONDS, wait_for

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12
SETTINGS = (
    f"train.steps={STEPS}",
    "train.ranks=2",
    "rollout.prompts_per_step=16",
    "rollout.responses_per_prompt=8",
    "eval.every=0",
    "checkpoint.every=3",
    "schedule.mode=overlap",
    "lora.rank=8",
)

pytestmark = pytest.mark.e2e


class Run:
    """The command, and those who work for it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        sources = (f"model.path={model}", f"data.sources.0.file={model}/data/train.jsonl")
        heldout = f"data.heldout_sources.0.file={model}/data/heldout.jsonl"
        flags = [flag for setting in (*sources, heldout, *SETTINGS) for flag in ("--set", setting)]
        command = [sys.executable, "main_rl.py", "--config", "configs/grpo_tiny.yaml", "--run-dir", str(folder), *flags]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip

    def wait_for_step(self, step: int) -> None:
        def is_done() -> bool:
            assert self.process.poll() is None, self.said()
            return any(row["step"] >= step for row in self.rows())

        wait_for(is_done, f"step {step} is done")

    def rows(self) -> list[dict[str, float]]:
        return read_metrics(self.folder) if (self.folder / "metrics.jsonl").exists() else []

    def kill_one(self, name: str) -> None:
        found = [p for p in psutil.Process(self.process.pid).children(recursive=True) if name in p.name()]
        assert found, f"nobody is called {name}"
        found[-1].kill()

    def said(self) -> str:
        return self.process.communicate(timeout=2 * PATIENCE_SECONDS)[0]


def test_a_job_with_adapters_survives_a_killed_engine_and_a_killed_rank(tiny_model: Path, tmp_path: Path) -> None:
    """Alone catches a command that does not begin again by itself when a trainer rank is lost."""
    run = Run(tmp_path / "run", tiny_model)
    try:
        run.wait_for_step(2)
        run.kill_one("EngineCore")
        run.wait_for_step(6)
        run.kill_one("TrainerActor")
        said = run.said()
    finally:
        if run.process.poll() is None:
            run.process.terminate()
            run.process.communicate(timeout=2 * PATIENCE_SECONDS)
    assert run.process.returncode == 0, said[-3000:]
    assert "It is started again" in said and "The job begins again from" in said, said
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(STEPS + 1)), "no step is missing, and none is there twice"
    groups = [{sample["group"] for sample in read_samples(run.folder, step)} for step in range(1, STEPS + 1)]
    assert all(len(names) == 16 for names in groups) and len(set().union(*groups)) == 16 * STEPS
    assert max(row.get("train/staleness_max", 0) for row in rows[1:]) <= 1
    assert max(row.get("sync/probe_gap_max", 0) for row in rows) < 1e-2, "engines held the adapter that was trained"
    newest = checkpoints(run.folder)[-1]
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in newest.iterdir()}
    assert not (newest / "model.safetensors").exists(), "a checkpoint holds the adapter alone"
    whole = (tiny_model / "model.safetensors").stat().st_size
    sent = [row["sync/bytes"] for row in rows[1:] if row.get("sync/bytes")]
    assert 0 < max(sent) < whole / 3, "only the adapter is sent"
