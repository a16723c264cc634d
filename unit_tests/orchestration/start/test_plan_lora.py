"""What is said of a job with adapters before it starts: memory, plan, warnings, mistakes."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from configs.blocks.lora import Lora
from configs.blocks.rl import RLConfig
from configs.reading.load import ConfigError, load
from configs.rules.every_job import warnings_for
from data_feeds.prompts.prompts import PromptSets
from orchestration.cluster.devices import DeviceSpec
from orchestration.cluster.job_shape import EngineJob
from orchestration.engines.actor import engine_arguments
from orchestration.model.adapter_files import save_adapter
from orchestration.model.checkpoint_facts import ModelFacts
from orchestration.model.lora import AdapterSize
from orchestration.rl.actors import trainer_settings
from orchestration.run.directory import RunDirectory
from orchestration.start.memory_estimate import SecondModels, estimate
from orchestration.start.plan import print_plan
from orchestration.start.plan_rl import plan_rl
from orchestration.start.preflight import Checked, check_adapter
from records.rollout import Prompt
from rollouts.vllm.engine import VLLMEngine
from unit_tests.tiny_model import write_tiny_model

MODEL = ModelFacts("m", "LlamaForCausalLM", 100_000_000, 30, 576, 1536, 9, 3, 64, 49152, 8192)
ADAPTER = AdapterSize(parameters=1_000_000, matrices=210)
CPU = DeviceSpec("cpu", "gloo", "feynrl_buckets", 8, 0)


def job(*overrides: str) -> RLConfig:
    return load("configs/grpo.yaml", RLConfig, ["model.dtype=bfloat16", "train.ranks=2", *overrides])


def memory(*overrides: str, reference: bool = True, critic: bool = False) -> Any:
    config = job("lora.rank=8", *overrides)
    return estimate(config, MODEL, SecondModels(reference=reference, critic=critic, adapter=ADAPTER), "cpu")


def adapter_of(config):
    return check_adapter(config.lora, config.model)


def test_memory_counts_masters_moments_and_gradients_of_adapters_only() -> None:
    found = memory("train.zero_stage=1")
    parts = {name: size for name, size in found.trainer.items() if "activations" not in name}
    assert parts == {
        "weights": 202_000_000,
        "float32 master weights": 2_000_000,
        "Adam moments": 4_000_000,
        "gradients": 4_000_000,
    }
    # all weights in float32 masters and moments, halved over two ranks; gradients; the reference
    assert found.saved_by_adapter == 100e6 * (2 + 12 / 2 + 4 + 2) - sum(parts.values())
    assert memory("train.zero_stage=3").trainer["weights"] == 101_000_000
    assert memory(critic=True).trainer["critic, with its optimizer"] == 100_000_000 * (2 + 12 // 2 + 4)
    assert estimate(job(), MODEL, SecondModels(reference=True), "cpu").saved_by_adapter == 0


def test_what_is_synced_and_kept_is_small_unless_merged() -> None:
    found = memory()
    assert (found.sync, found.checkpoints, found.engine["adapter"]) == (2_000_000, 3 * 16_000_000, 2_000_000), (
        "three, with their states"
    )
    assert memory("lora.sync=merged").sync == 200_000_000
    assert "adapter" not in memory("lora.sync=merged").engine
    assert memory("checkpoint.merged=true").checkpoints == 3 * 216_000_000


def test_the_plan_says_what_is_trained_and_saved() -> None:
    config, prompts = job("lora.rank=8"), [Prompt(f"p/{i}", [{"role": "user", "content": "?"}]) for i in range(9)]
    checked, data = Checked(CPU, MODEL, [], ADAPTER), PromptSets(prompts[:8], prompts[8:], 0, 0, 0)
    text = io.StringIO()
    print_plan(plan_rl(config, checked, data), [], Console(file=text, width=250))
    told = " ".join(text.getvalue().split())
    assert "LoRA of rank 8 on 210 matrices: 1,000,000 trained parameters (1.0% of the model's)" in told
    assert "less per trainer rank than training every weight; engines take the adapter" in told


def test_the_block_reaches_trainer_and_engine(tmp_path: Path) -> None:
    config = job("lora.rank=12", "checkpoint.merged=true")
    settings = trainer_settings(config, RunDirectory(tmp_path, "id"))
    assert settings.lora == config.lora and settings.merged_checkpoints
    engine = VLLMEngine(**engine_arguments(EngineJob.of_rl(config), CPU, seed=0, threads=1))
    assert engine.arguments["enable_lora"] and engine.arguments["max_loras"] == 1
    assert engine.arguments["max_lora_rank"] == 16  # vLLM has no 12
    for other in (job(), job("lora.sync=merged")):
        assert (
            "enable_lora"
            not in VLLMEngine(**engine_arguments(EngineJob.of_rl(other), CPU, seed=0, threads=1)).arguments
        )


def test_what_a_user_should_know() -> None:
    assert not [w for w in warnings_for(job()) if "lora" in w.lower()]
    assert any("lora.sync: merged weights are rounded to bfloat16" in w for w in warnings_for(job("lora.sync=merged")))
    assert not any("lora.sync" in w for w in warnings_for(job("lora.sync=merged", "model.dtype=float32")))


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["checkpoint.merged=true"], "checkpoint.merged: there is nothing to merge without lora"),
        (["lora.target_modules=[]"], "'target_modules' is empty"),
        (["lora.rnak=3"], "did you mean lora.rank"),
        (["rollout.engine={enable_lora: true}"], "rollout.engine.enable_lora: is set elsewhere: use the lora block"),
    ],
)
def test_mistakes_in_the_block_are_refused(overrides: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        job(*overrides)


def test_what_does_not_fit_the_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    assert adapter_of(job(f"model.path={model}")) is None
    size = adapter_of(job(f"model.path={model}", "lora.rank=2"))
    assert size is not None and size.matrices == 14
    with pytest.raises(ValueError, match="no module 'gate'; did you mean gate_proj"):
        adapter_of(job(f"model.path={model}", "lora.target_modules=[gate]"))
    other = write_tiny_model(tmp_path / "other")
    config = job(f"model.path={model}", "lora.rank=2", f"lora.adapter={tmp_path / 'adapter'}")
    assert config.lora is not None
    with pytest.raises(ValueError, match="no adapter in PEFT's format"):
        adapter_of(config)
    save_adapter(tmp_path / "adapter", {}, config.lora, str(other))
    with pytest.raises(ValueError, match="was trained on other weights"):
        adapter_of(config)


def test_yaml_in_the_page_is_valid_configuration() -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", Path("docs/guide/LORA.md").read_text(), re.MULTILINE | re.DOTALL)
    assert Lora.model_validate(yaml.safe_load(text)["lora"]) == Lora()
