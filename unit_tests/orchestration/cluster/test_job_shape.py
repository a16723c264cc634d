"""The shape of a job follows from its configuration, in both kinds of job that have engines."""

from __future__ import annotations

from configs.blocks.evaluation import EvalConfig
from configs.blocks.rl import RLConfig
from configs.reading.load import load
from orchestration.cluster.job_shape import EngineJob, TrainerJob


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
