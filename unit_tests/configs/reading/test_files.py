"""A job may extend another file: what merges, what replaces, and what a message says about where a key came from."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from configs.blocks.rl import RLConfig
from configs.reading.files import read_job
from configs.reading.load import ConfigError, load, to_yaml

BASE = """
model: {path: models/x}
data:
  sources:
    - {file: rows.jsonl}
algorithm: {name: grpo, clip_high: 0.28}
objective:
  advantage: {function: group_zscore, params: {tolerance: 1e-3}}
  kl: {coef: 0.1, estimator: k2}
reward: {parts: [{function: last_number}]}
train:
  steps: 80
  learning_rate: 3e-5
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "deeper").mkdir()
    return tmp_path


def child(folder: Path, text: str, name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_blocks_merge_and_the_rest_replaces(folder: Path) -> None:
    path = child(
        folder,
        "extends: base.yaml\n"
        "train: {steps: 5}\n"
        "objective: {kl: {coef: 0.2}}\n"
        "data: {sources: [{file: other.jsonl}]}\n"
        "rollout: {max_new_tokens: 7}\n",
    )
    config = load(path, RLConfig)
    assert (config.train.steps, config.train.learning_rate) == (5, 3e-5)
    assert (config.objective.kl.coef, config.objective.kl.estimator) == (0.2, "k2")
    assert [source.file for source in config.data.sources] == ["other.jsonl"]
    assert config.rollout.max_new_tokens == 7 and config.algorithm.params["clip_high"] == 0.28


def test_a_method_or_function_of_another_name_leaves_its_predecessors_parameters_behind(folder: Path) -> None:
    same = load(child(folder, "extends: base.yaml\nalgorithm: {name: grpo, clip_low: 0.1}\n"), RLConfig)
    assert same.algorithm.params == {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 3.0}
    unnamed = load(child(folder, "extends: base.yaml\nalgorithm: {clip_low: 0.1}\n"), RLConfig)
    assert unnamed.algorithm == same.algorithm
    other = load(child(folder, "extends: base.yaml\nalgorithm: {name: cispo}\n"), RLConfig)
    assert other.algorithm.params == {"ratio_cap": 5.0, "ratio_floor": 0.0}
    rloo = load(child(folder, "extends: base.yaml\nobjective: {advantage: {function: rloo}}\n"), RLConfig)
    assert rloo.objective.advantage is not None and rloo.objective.advantage.params == {}
    assert rloo.objective.kl.coef == 0.1


def test_chains_are_relative_to_the_file_that_extends(folder: Path) -> None:
    child(folder / "deeper", "extends: ../base.yaml\ntrain: {steps: 7, ranks: 2}\n", "middle.yaml")
    path = child(folder, "extends: deeper/middle.yaml\ntrain: {steps: 9}\n")
    config = load(path, RLConfig, ["train.learning_rate=1e-4"])
    assert (config.train.steps, config.train.ranks, config.train.learning_rate) == (9, 2, 1e-4)
    assert "extends" not in yaml.safe_load(to_yaml(config))


def test_a_message_names_the_file_and_line_a_key_came_from(folder: Path) -> None:
    child(folder, BASE.replace("steps: 80", "steps: -80").replace("path:", "paht:"), "bad.yaml")
    path = child(folder, "extends: bad.yaml\ntrain:\n  ranks: -1\n")
    with pytest.raises(ConfigError) as caught:
        load(path, RLConfig, ["train.threads_per_rank=-1"])
    text = str(caught.value)
    bad = folder / "bad.yaml"
    assert f"train.steps: must be at least 1; given -80 (line 12 of {bad})" in text
    assert f"model.paht: unknown key; did you mean model.path? (line 2 of {bad})" in text
    assert "train.ranks: must be at least 1; given -1 (line 3)" in text
    assert "train.threads_per_rank: must be at least 0; given -1 (from the command line)" in text
    child(folder, BASE + "  warmup_steps: -5\n", "bad.yaml")
    with pytest.raises(ConfigError) as caught:
        load(child(folder, "extends: bad.yaml\ntrain: {warmup_steps: -6}\n"), RLConfig)
    assert str(caught.value) == f"{path}: train.warmup_steps: must be at least 0; given -6 (line 2)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "extends: bas.yaml\n",
            "extends (line 1): {folder}/bas.yaml: there is no such file; did you mean {folder}/base.",
        ),
        ("extends: deeper\n", "extends (line 1): {folder}/deeper: is a folder"),
        (
            "train: {}\nextends: [base.yaml]\n",
            "extends (line 2): must be the path of one YAML file; given ['base.yaml']",
        ),
        ("extends:\n", "must be the path of one YAML file; given None"),
        ("extends: job.yaml\n", "extend one another in a circle: {folder}/job.yaml -> {folder}/job.yaml"),
        ("extends: loop.yaml\n", "in a circle: {folder}/job.yaml -> {folder}/loop.yaml -> {folder}/deeper/../job.yaml"),
        ("extends: list.yaml\n", "{folder}/list.yaml: holds a list"),
        ("train: {extends: base.yaml}\n", "train.extends: unknown key"),
        ("extends: {long}.yaml\n", "there is no such file"),
        ("extends: chain0.yaml\n", "chain18.yaml: extends (line 1): more than 20 files extend one another"),
    ],
)
def test_what_cannot_be_extended(folder: Path, text: str, expected: str) -> None:
    child(folder, "extends: deeper/../job.yaml\n", "loop.yaml")
    child(folder, "- 1\n", "list.yaml")
    for n in range(40):
        child(folder, f"extends: chain{n + 1}.yaml\n", f"chain{n}.yaml")
    with pytest.raises(ConfigError) as caught:
        load(child(folder, text.replace("{long}", "x" * 5000)), RLConfig)
    assert expected.format(folder=folder) in str(caught.value)


def test_extends_is_no_override(folder: Path) -> None:
    with pytest.raises(ConfigError, match="extends can only stand in a file"):
        load(folder / "base.yaml", RLConfig, ["extends=base.yaml"])


def test_a_block_shared_by_an_anchor_changes_in_one_place_only(folder: Path) -> None:
    child(folder, "a: &shared {x: 1}\nb: *shared\n", "anchors.yaml")
    raw, origins = read_job(child(folder, "extends: anchors.yaml\na: {y: 2}\n"))
    assert raw == {"a": {"x": 1, "y": 2}, "b": {"x": 1}}
    assert origins[("a", "y")] == "line 2" and origins[("b",)] == f"line 2 of {folder / 'anchors.yaml'}"
