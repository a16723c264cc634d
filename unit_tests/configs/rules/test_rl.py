"""Rules that span keys: each refused combination names its key and a way out that then works."""

from __future__ import annotations

from typing import Any

import pytest

from configs.blocks.evaluation import EvalConfig
from configs.blocks.rl import Checkpoint, RLConfig
from configs.reading.load import ConfigError, checked, load
from configs.rules.every_job import warnings_for


def job(*overrides: str) -> RLConfig:
    return load("configs/grpo.yaml", RLConfig, overrides)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["train.updates_per_step=3"],
            "rollout.prompts_per_step: 16 prompts do not split evenly into 3 optimizer steps; use "
            "train.updates_per_step 2 or 4, or rollout.prompts_per_step 15 or 18",
        ),
        (["train.updates_per_step=32"], "use train.updates_per_step 16, or rollout.prompts_per_step 32"),
        (["train.ranks=129"], "train.ranks: an optimizer step has 128 responses for 129 ranks; use at most 128"),
        (["train.min_learning_rate=1e-4"], "train.min_learning_rate: 0.0001 is above train.learning_rate 3e-05"),
        (
            ["train.steps=50", "train.warmup_steps=50"],
            "train.warmup_steps: 50 must be below the run's 50 optimizer steps",
        ),
        (["rollout.responses_per_prompt=1"], "rollout.responses_per_prompt: 1 gives every response an advantage of 0"),
        (["eval.samples_per_prompt=4"], "eval.samples_per_prompt: 4 greedy responses to one prompt are all the same"),
        (["reward.parts.0.weight=0", "reward.parts.1.weight=0"], "reward.parts: every weight is 0"),
        (
            ["train.deepspeed={zero_optimization: {reduce_bucket_size: auto}}"],
            "train.deepspeed.zero_optimization.reduce_bucket_size: 'auto' is dropped silently",
        ),
        (["train.deepspeed={a: [1, auto]}"], "train.deepspeed.a.1: 'auto'"),
        (
            ["train.deepspeed={zero_optimization: {stage: 2}}"],
            "train.deepspeed.zero_optimization.stage: is set elsewhere",
        ),
        (["train.deepspeed={train_batch_size: 8}"], "train.deepspeed.train_batch_size: is set elsewhere"),
        (
            ["train.deepspeed={fp16: {enabled: true}}"],
            "train.deepspeed.fp16.enabled: is set elsewhere: use model.dtype",
        ),
        (["rollout.engine={dtype: float32}"], "rollout.engine.dtype: is set elsewhere: use model.dtype"),
        (["rollout.engine={seed: 0}"], "rollout.engine.seed: is set elsewhere: one seed for all requests"),
        (["rollout.engine={max_model_len: 1000}"], "rollout.engine.max_model_len: 1000 cannot hold the longest"),
        (["rollout.engine={gpu_memory_utilization: 90}"], "rollout.engine.gpu_memory_utilization: must be a share"),
    ],
)
def test_refused(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        job(*overrides)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.updates_per_step=2"],
        ["train.updates_per_step=3", "rollout.prompts_per_step=15"],
        ["train.ranks=128"],
        ["train.steps=50", "train.warmup_steps=49"],
        ["train.steps=50", "train.warmup_steps=50", "train.updates_per_step=2"],
        ["train.steps=50", "train.warmup_steps=149", "train.passes_per_batch=3"],
        ["train.min_learning_rate=3e-5", "train.schedule=cosine"],
        ["eval.samples_per_prompt=4", "eval.temperature=1.0"],
        ["train.deepspeed={zero_optimization: {reduce_bucket_size: 1000000}, bf16: {check_grad_overflow: true}}"],
        ["rollout.engine={max_model_len: 1040}"],
    ],
)
def test_the_ways_out_work_and_bring_no_warning(overrides: list[str]) -> None:
    assert warnings_for(job(*overrides)) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rollout.top_p=0.9"], "rollout.top_p: 0.9 samples from a truncated distribution"),
        (["rollout.top_k=50"], "rollout.top_k: 50 samples from a truncated distribution"),
        (
            ["train.schedule=constant", "train.min_learning_rate=1e-6"],
            "train.min_learning_rate: has no effect with train.schedule constant",
        ),
        (["sync.probe_tolerance=0.5"], "sync.probe_tolerance: 0.5 nats may not notice"),
        (["sync.probe_tolerance=0.01"], "sync.probe_tolerance: 0.01 nats is close to bfloat16's own noise"),
        (["train.steps=50", "eval.every=51"], "eval.every: 51 is above train.steps 50"),
        (["train.steps=50", "checkpoint.every=51"], "checkpoint.every: 51 is above train.steps 50"),
        (["reward.pass_threshold=1.5"], "reward.pass_threshold: 1.5 is above the sum of the positive weights 1"),
        (["train.max_tokens_per_micro_batch=1000"], "train.max_tokens_per_micro_batch: 1000 is below the longest"),
        (["rollout.engine={quantization: fp8}"], "rollout.engine.quantization: the engine samples from other weights"),
    ],
)
def test_warned_about(overrides: list[str], expected: str) -> None:
    found = warnings_for(job(*overrides))
    assert len(found) == 1 and found[0].startswith(expected)


def test_a_float32_probe_may_be_tight() -> None:
    assert warnings_for(job("sync.probe_tolerance=0.01", "model.dtype=float32")) == []


def test_rules_hold_for_configurations_made_in_python(minimal_blocks: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="do not split evenly"):
        checked(RLConfig(**minimal_blocks, train={"updates_per_step": 5}))


@pytest.fixture
def minimal_blocks() -> dict[str, Any]:
    return {
        "model": {"path": "x"},
        "data": {"sources": [{"file": "x.jsonl"}]},
        "algorithm": {"name": "grpo"},
        "reward": {"parts": [{"function": "last_number"}]},
    }


def test_evaluation_rules() -> None:
    def refused(*overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load("configs/eval.yaml", EvalConfig, overrides)
        return str(caught.value)

    assert "reward.parts: every weight is 0" in refused("reward.parts.0.weight=0")
    assert "engine.tensor_parallel_size: is set elsewhere" in refused("engine.tensor_parallel_size=2")
    assert "engine.max_model_len: 8 cannot hold the longest" in refused("engine.max_model_len=8")


@pytest.mark.parametrize(
    ("every", "steps", "period"), [(None, 9, 10), (None, 101, 11), (None, 5000, 500), (0, 50, 0), (3, 50, 3)]
)
def test_a_run_leaves_something_to_go_on_from(every: int | None, steps: int, period: int) -> None:
    assert Checkpoint(every=every).period(steps) == period
