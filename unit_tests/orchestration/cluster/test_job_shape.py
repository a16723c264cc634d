"""The shape of a job follows from its configuration, in both kinds of job that have engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.blocks.evaluation import EvalConfig
from configs.blocks.rl import Model, RLConfig
from configs.reading.load import load
from orchestration.cluster.job_shape import EngineJob, TrainerJob
from orchestration.rl.actors import trainer_settings
from orchestration.run.directory import RunDirectory

ROOT = Path(__file__).resolve().parents[3]


def rl(*overrides: str) -> RLConfig:
    return load("configs/grpo.yaml", RLConfig, ["data.max_prompt_tokens=100", *overrides])


def test_engines_of_a_training_job_also_hold_its_evaluations() -> None:
    job = EngineJob.of_rl(rl("rollout.max_new_tokens=16", "eval.max_new_tokens=40"))
    assert (job.max_new_tokens, job.max_model_len) == (40, 140)
    assert job.tokens_at_once == 16 * 8 * (100 + 16), "of a step; an evaluation is another time"
    assert EngineJob.of_rl(rl("rollout.max_new_tokens=16")).max_model_len == 116


def test_engines_of_an_evaluation_are_not_replaced() -> None:
    job = EngineJob.of_eval(load("configs/eval.yaml", EvalConfig, ["engines=2", "tensor_parallel_size=3"]))
    assert (job.processes, job.failures.engine_restarts, job.key_prefix) == (6, 0, "")
    assert EngineJob.of_rl(rl()).failures.engine_restarts > 0


def test_engines_take_an_adapter_only_when_it_is_what_is_synced() -> None:
    assert EngineJob.of_rl(rl("lora.rank=12")).lora_rank == 12
    assert EngineJob.of_rl(rl("lora.rank=12", "lora.sync=merged")).lora_rank is None
    assert EngineJob.of_rl(rl()).lora_rank is None


def test_engines_pause_only_in_overlap() -> None:
    overlap, pause = "schedule.mode=overlap", "schedule.pause_while_training=true"
    assert EngineJob.of_rl(rl(overlap, pause)).pauses_while_training
    assert not EngineJob.of_rl(rl(overlap)).pauses_while_training
    assert TrainerJob.of_rl(rl(overlap)).colocate is False, "both sides work at the same time"
    assert TrainerJob.of_rl(rl(overlap, pause)).colocate is None


def test_actors_get_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's workers have the current directory of the raylet, not of the driver."""
    monkeypatch.chdir(tmp_path)
    for folder in ("mine/model", "mine/adapter", "models"):
        (tmp_path / folder).mkdir(parents=True)
    keys = ["model.path=mine/model", "lora={adapter: mine/adapter}"]
    config = load(ROOT / "configs/grpo_tiny.yaml", RLConfig, keys)
    settings = trainer_settings(config, RunDirectory("runs/a", "id"))
    assert EngineJob.of_rl(config).model.path == settings.model.path == str(tmp_path / "mine/model")
    assert settings.lora is not None and settings.lora.adapter == str(tmp_path / "mine/adapter")
    assert settings.capture_folder == str(tmp_path / "runs/a/captured_steps") and settings.base_name == "mine/model"
    assert Model(path="owner/name").located().path == "owner/name"
