"""Every mistake in files or machine is found before anything starts, named, and reported together with the others."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from configs.blocks.evaluation import EvalConfig
from configs.blocks.rl import RLConfig
from configs.reading.load import ConfigError, load
from data_feeds.prompts.prompts import PromptSets
from main_eval import EVAL
from main_rl import RL
from orchestration.cluster.devices import FLEX, DeviceSpec
from orchestration.cluster.job_shape import EngineJob, TrainerJob
from orchestration.model.checkpoint_facts import model_facts
from orchestration.start import memory_estimate, preflight
from orchestration.start.command_line import checked_with_data
from orchestration.start.memory_estimate import SecondModels, estimate
from unit_tests.tiny_model import write_tiny_model

JOB = """
model: {path: tiny, dtype: float32, device: cpu}
data: {sources: [{file: rows.jsonl}], max_prompt_tokens: 64}
algorithm: {name: grpo}
rollout: {prompts_per_step: 4, responses_per_prompt: 4, max_new_tokens: 8}
reward: {parts: [{function: last_number}]}
train: {steps: 4}
eval: {every: 2}
"""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    write_tiny_model(folder / "tiny")
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(9) for b in range(9)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "job.yaml").write_text(JOB)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path, monkeypatch: Any) -> Path:
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


def checked(*overrides: str, run_dir: str | None = None) -> tuple[preflight.Checked, PromptSets]:
    return checked_with_data(RL, load("job.yaml", RLConfig, overrides, run_dir))


def warned(*overrides: str) -> list[str]:
    config = load("job.yaml", RLConfig, overrides)
    found, prompts = checked_with_data(RL, config)
    return [*found.warnings, *RL.data_warnings(config, prompts)]


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        checked(*overrides)
    return str(caught.value)


def test_a_good_job_is_described(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    found, prompts = checked()
    assert found.model.layers == 2 and found.device.device == "cpu"
    assert len(prompts.train) + len(prompts.heldout) == 81
    assert warned() == []
    assert sorted(folder.rglob("*")) == before, "preflight writes nothing"


def test_dropout_is_said_to_be_off(folder: Path) -> None:
    file = folder / "tiny" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attention_dropout": 0.1}))
    (warning,) = warned()
    assert warning.startswith("model.path: tiny asks for attention_dropout 0.1 in training; it is switched off")


def test_dynamic_rotary_embeddings_are_refused_for_training(folder: Path) -> None:
    file = folder / "tiny" / "config.json"
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_parameters": rope}))
    assert "model.path: tiny has rope_type dynamic: log-probabilities then depend" in refused()


def test_all_mistakes_at_once(folder: Path) -> None:
    (folder / "runs" / "run").mkdir(parents=True)
    (folder / "runs" / "run" / "config.yaml").write_text("x: 1\n")
    text = refused("model.path=tinny", "train.ranks=16", "reward.parts.0.function=my_lab.none:score")
    assert text.startswith("4 problems\n")
    for expected in (
        "run directory runs/run already holds a run; choose another",
        "model.path: there is no folder 'tinny'",
        "(did you mean tiny?)",
        "train.ranks: 16 ranks on",
        "reward.parts.0: reward 'my_lab.none:score': there is no module my_lab",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["reward.parts.0.function=lst_number"], "did you mean last_number?"),
        (
            ["reward.parts.0.params={tol: 1}"],
            "reward.parts.0: reward 'last_number': params.tol: unknown key; there are: tolerance",
        ),
        (["reward.parts.0.function=statistics:mean"], "it would be logged as reward/mean, which is another metric"),
        (
            ["reward.parts.0.params={tolerance: much}"],
            "reward.parts.0: reward 'last_number': params.tolerance: must be a number",
        ),
        (["reward.parts.0={function: format_match, params: {pattern: '['}}"], "params.pattern: '[' is no regular exp"),
        (
            ["rollout.filters=[overlong, zero_varianc]"],
            "rollout.filters.1: filter 'zero_varianc': there is no filter of that name; did you mean",
        ),
        (
            ["rollout.filters=[{function: pass_rate, params: {hi: 1}}]"],
            "rollout.filters.0: filter 'pass_rate': params.hi: unk",
        ),
        (
            ["rollout.filters=[zero_variance]", "rollout.responses_per_prompt=1", "algorithm.name=reinforce_plus_plus"],
            "rollout.filters.0: filter 'zero_variance': rollout.responses_per_prompt is 1",
        ),
        (["rollout.environment=single_trun"], "environment 'single_trun'"),
        (["data.sources.0.prompt_column=question"], "there is no column 'question'"),
        (["data.sources.0.file=rws.jsonl"], "data file rws.jsonl: no such file; did you mean"),
        (["data.sources.0={reasoning_gym: chain_smu}"], "data.sources.0.reasoning_gym: reasoning_gym has no task"),
        (
            ["data.sources.0={reasoning_gym: chain_sum, params: {min: 1}}"],
            "data.sources.0.params: chain_sum: there is no",
        ),
        (["data.max_prompt_tokens=2"], "every prompt is longer than data.max_prompt_tokens (2)"),
        (["data.max_prompt_tokens=2041"], "= 2049 tokens, but tiny has 2048 positions"),
        (
            ["rollout.tensor_parallel_size=3"],
            "4 attention heads of tiny do not split over 3 devices; use one of 1, 2, 4",
        ),
        (["run.dir=job.yaml"], "job.yaml is a file, so job.yaml/run cannot be made"),
    ],
)
def test_refused(folder: Path, overrides: list[str], expected: str) -> None:
    assert expected in refused(*overrides)


def test_model_without_chat_template(folder: Path) -> None:
    write_tiny_model(folder / "bare", chat_template=None)
    assert "model.path: the tokenizer of 'bare' has no chat template" in refused("model.path=bare")


def test_empty_data(folder: Path) -> None:
    (folder / "rows.jsonl").write_text("\n")
    assert "data file rows.jsonl: it holds no row" in refused()


def test_a_folder_with_other_files_is_left_alone(folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "thesis.txt").write_text("work")
    with pytest.raises(ConfigError, match="run directory mine is not empty"):
        checked(run_dir="mine")
    (folder / "empty").mkdir()
    checked(run_dir="empty")


def test_a_folder_that_may_not_be_written(folder: Path, monkeypatch: Any) -> None:
    (folder / "locked").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked")  # root may write everywhere
    assert "locked is not writable" in refused("run.dir=locked")


def test_devices_on_cpu(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert "train.ranks: 3 ranks on 2 CPU cores" in refused("train.ranks=3")
    assert "rollout.engines x rollout.tensor_parallel_size = 4 engine processes on 2 CPU cores" in refused(
        "rollout.engines=4"
    )
    assert any(
        "train.threads_per_rank: 2 ranks x 2 threads" in w for w in warned("train.ranks=2", "train.threads_per_rank=2")
    )
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    cluster = warned("train.ranks=3", "rollout.engines=5")  # the cluster's machines are not known here
    assert any("sync.method: direct reaches engines on the trainer's machine only" in w for w in cluster)
    assert any("rollout.engines: 5 engines for 4 prompts a step" in w for w in cluster)


def devices_for(config: RLConfig) -> DeviceSpec:
    return preflight.check_devices(EngineJob.of_rl(config), TrainerJob.of_rl(config))


def test_devices_on_gpus(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(preflight, "resolve", lambda device: DeviceSpec("cuda", "nccl", FLEX, 64, 8))
    fits = load("job.yaml", RLConfig, ["train.ranks=4", "rollout.engines=2", "rollout.tensor_parallel_size=2"])
    assert devices_for(fits).gpus == 8
    shared = load("job.yaml", RLConfig, ["train.ranks=5", "rollout.engines=4"])
    assert devices_for(shared).gpus == 8
    for settings in (["train.ranks=9"], ["train.ranks=5", "rollout.engines=2", "rollout.tensor_parallel_size=2"]):
        with pytest.raises(ValueError, match=r"train.ranks \d and .* need \d+ GPUs.*there are 8"):
            devices_for(load("job.yaml", RLConfig, settings))


def test_cuda_without_a_gpu(folder: Path, monkeypatch: Any) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "model.device is cuda, but this machine has no CUDA device" in refused("model.device=cuda")


def test_room_for_weights_and_checkpoints(folder: Path, monkeypatch: Any) -> None:
    Usage = type(shutil.disk_usage("."))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100, 90, 10))
    text = refused()
    assert "sync.method: direct needs" in text and "use sync.method: disk" in text
    assert "run.dir: checkpoints need" in text and "lower checkpoint.keep" in text
    assert "run.dir: checkpoints and weight sync need" in refused("sync.method=disk")
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(preflight, "SHARED_MEMORY", folder / "none")
    assert "which this machine lacks; use sync.method: disk" in refused()
    checked("sync.method=disk")


def test_warnings_about_data_and_memory(folder: Path, monkeypatch: Any) -> None:
    assert any("up to 100 groups are under way" in w for w in warned("rollout.prompts_per_step=100"))
    many = ["rollout.prompts_per_step=30", "schedule.max_staleness=3"]
    assert not any("under way" in w for w in warned(*many))
    assert any("up to 120 groups are under way" in w for w in warned(*many, "schedule.mode=overlap"))
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in ("1", "2", "3", "1 " * 99))
    )
    assert any("data.max_prompt_tokens: 1 rows are longer" in w for w in warned())
    monkeypatch.setattr(preflight, "machine_memory", lambda: 1000)
    assert any(w.startswith("memory: about") for w in warned())


def test_an_evaluation_is_checked_too(folder: Path) -> None:
    (folder / "eval.yaml").write_text(
        "model: {path: tiny, device: cpu}\ndata: {sources: [{file: rows.jsonl}], max_prompt_tokens: 64}\n"
        "reward: {parts: [{function: last_number}]}\neval: {max_new_tokens: 8}\n"
    )
    config = load("eval.yaml", EvalConfig)
    found, prompts = checked_with_data(EVAL, config)
    assert len(prompts.part("all")) == 81
    memory = memory_estimate.memory_of_engine(EngineJob.of_eval(config), found.model, "cpu")
    assert memory["weights"] == 2 * found.model.parameters
    with pytest.raises(ConfigError, match="tensor_parallel_size: 4 attention heads of tiny do not split over 3"):
        checked_with_data(EVAL, load("eval.yaml", EvalConfig, ["tensor_parallel_size=3"]))


def test_memory_is_sharded_by_zero_stage(folder: Path) -> None:
    model = dataclasses.replace(model_facts(load("job.yaml", RLConfig).model), parameters=1_000_000)

    def trainer(*overrides: str) -> dict[str, int]:
        config = load("job.yaml", RLConfig, ["train.ranks=4", "model.dtype=bfloat16", *overrides])
        parts = estimate(config, model, has=SecondModels(), device="cpu").trainer
        return {name: size // 1_000_000 for name, size in parts.items() if "activations" not in name}

    names = ("weights", "float32 master weights", "Adam moments", "gradients")
    assert trainer("train.zero_stage=0") == dict(zip(names, (2, 4, 8, 4), strict=True))
    assert trainer("train.zero_stage=1") == dict(zip(names, (2, 1, 2, 4), strict=True))
    assert trainer("train.zero_stage=2") == dict(zip(names, (2, 1, 2, 1), strict=True))
    assert trainer("train.zero_stage=3") == dict(zip(names, (0, 1, 2, 1), strict=True))
    assert "float32 master weights" not in trainer("model.dtype=float32")


def test_memory_of_this_machine_is_positive() -> None:
    assert memory_estimate.machine_memory() > 2**27
    assert memory_estimate.shown(2**30) == "1.00 GiB" and memory_estimate.shown(2**20) == "1.0 MiB"


def test_head_dimensions_that_vllm_has_no_cpu_attention_for(folder: Path, monkeypatch: Any) -> None:
    config = json.loads((folder / "tiny" / "config.json").read_text())
    (folder / "tiny" / "config.json").write_text(json.dumps({**config, "head_dim": 16}))
    assert "model.path: tiny has attention heads of dimension 16; on a CPU vLLM runs 32, 64, 80" in refused()
    facts = dataclasses.replace(model_facts(load("job.yaml", RLConfig).model), head_dim=16)
    preflight.check_head_dim(facts, DeviceSpec("cuda", "nccl", "feynrl_flex", 64, 8))


def test_head_dimensions_are_those_of_the_installed_vllm() -> None:
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.origin is not None
    source = (Path(found.origin).parent / "v1" / "attention" / "backends" / "cpu_attn.py").read_text()
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    (sizes,) = [f.body[-1] for f in functions if f.name == "get_supported_head_sizes"]
    assert isinstance(sizes, ast.Return) and sizes.value is not None
    assert tuple(ast.literal_eval(sizes.value)) == preflight.CPU_HEAD_DIMS
