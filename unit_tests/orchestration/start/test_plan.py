"""The plan's arithmetic is the configuration's."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from configs.blocks.evaluation import EvalConfig
from configs.blocks.rl import RLConfig
from configs.reading.load import load
from data_feeds.prompts.prompts import PromptSets
from main_eval import EVAL
from main_rl import RL
from orchestration.cluster.devices import DeviceSpec
from orchestration.model.checkpoint_facts import ModelFacts
from orchestration.start.job_kind import JobKind
from orchestration.start.plan import print_plan
from orchestration.start.plan_rl import schedule_text
from orchestration.start.preflight import Checked
from records.rollout import Prompt

MODEL = ModelFacts("m", "LlamaForCausalLM", 135_000_000, 30, 576, 1536, 9, 3, 64, 49152, 8192)


def described(kind: JobKind[Any, PromptSets], config: RLConfig | EvalConfig, warnings: list[str]) -> str:
    prompts = [Prompt(f"p/{i}", [{"role": "user", "content": "?"}], source="sums") for i in range(100)]
    data = PromptSets(prompts[:80], prompts[80:], duplicates=7, too_long=1, leaks=0)
    checked = Checked(DeviceSpec("cpu", "gloo", "feynrl_buckets", 8, 0), MODEL, warnings)
    text = io.StringIO()
    print_plan(kind.plan(config, checked, data), warnings, Console(file=text, width=250))
    return " ".join(text.getvalue().split())


def test_training() -> None:
    text = described(
        RL, load(
            "configs/grpo.yaml", RLConfig,
            ["train.updates_per_step=2", "train.steps=20", "train.ranks=2", "data.max_prompt_tokens=64",
             "train.max_tokens_per_micro_batch=512", "checkpoint.every=5"],
        ),
        ["rollout.top_p: biased"],
    )  # fmt: skip
    assert "16 prompts x 8 responses = 128 sequences, at most 2,048 new tokens" in text
    # 128 x 16 new tokens and 16 shared prompts of 64 = 3,072 tokens; over 2 updates, 512 a batch and 2 ranks = 1.5
    assert "2 optimizer step(s) of 64 sequences, at most 2 micro-batch(es) of 512 tokens per rank" in text
    assert "20 steps = 40 optimizer steps, 320 prompts asked = 4.0 epochs" in text
    assert "80 prompts (80 sums)" in text and "20 prompts, split by unordered_numbers" in text
    assert "7 duplicates, 1 too long, 0 also held out" in text
    assert "3 times, 20 held-out prompts x 1" in text  # before, after step 10, after step 20
    assert "2 rank(s), ZeRO 1, 4 thread(s) each, gloo" in text
    assert "135,000,000 parameters" in text and "6.03 GiB of disk" in text  # 3 x 2 bytes a parameter, 3 x 14 to resume
    assert "warning: rollout.top_p: biased" in text and "runs/grpo" in text
    assert not Path("runs/grpo").exists() or "nothing was written" in text


def test_passes_over_a_batch() -> None:
    job = load(
        "configs/grpo.yaml", RLConfig, ["train.steps=20", "train.updates_per_step=2", "train.passes_per_batch=3"]
    )
    text = described(RL, job, [])
    assert "6 optimizer step(s) of 64 sequences in 3 passes over the batch, at most" in text
    assert "20 steps = 120 optimizer steps, 320 prompts asked" in text
    assert "old_logprobs: passes of their own before a step's first update" in text


def test_evaluation() -> None:
    text = described(EVAL, load("configs/eval.yaml", EvalConfig), [])
    assert "20 of 20 prompts (heldout)" in text
    assert "8 samples at temperature 1 and 1 greedy each = 180 sequences, at most 2,880 new tokens" in text
    assert "no warnings" in text and "evaluation.json" in text


def test_placement() -> None:
    """Who gets which cores, in turn and at the same time."""
    ranks = ["train.ranks=2", "rollout.engines=2"]
    assert "placement colocated: trainer (4 thread(s) a rank) and engines (4 a process) in turn" in described(
        RL, load("configs/grpo.yaml", RLConfig, ranks), []
    )
    overlap = [*ranks, "schedule.mode=overlap", "placement.trainer_cores=5"]
    assert "separate, at the same time: trainer 2 x 2 thread(s), engines 2 x 1, on 8 cores; not bound" in described(
        RL, load("configs/grpo.yaml", RLConfig, overlap), []
    )
    bound = load("configs/grpo.yaml", RLConfig, [*overlap, "placement.bind_cores=true"])
    assert "bound: ranks to cores 0,1 | 2,3,4, engines to 5 | 6,7" in described(RL, bound, [])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ([], "sync: generate, train, sync weights, in turn"),
        (["schedule.mode=overlap"], "at most 1 version(s) old, at most 32 groups under way"),
        (
            ["schedule.mode=overlap", "schedule.max_staleness=2", "schedule.over_issue=0.5"],
            "at most 24 groups under way",
        ),
        (
            ["schedule.mode=overlap", "schedule.over_issue=0.5", "rollout.prompts_per_step=5"],
            "at most 7 groups under way",
        ),
        (
            ["schedule.mode=overlap", "schedule.replay_buffer_versions=2", "schedule.replay_buffer_share=0.25"],
            "at most 24 groups under way",
        ),
        (
            ["schedule.replay_buffer_versions=2", "schedule.replay_buffer_share=0.25"],
            "25% of a batch reused for 2 versions",
        ),
    ],
)
def test_the_plan_says_when_both_sides_work(settings: list[str], says: str) -> None:
    assert says in schedule_text(load("configs/grpo.yaml", RLConfig, settings))
