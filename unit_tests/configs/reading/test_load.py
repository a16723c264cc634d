"""A configuration loads whole or ends in one message with every mistake, its key and the way out."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.blocks.evaluation import EvalConfig
from configs.blocks.rl import RLConfig
from configs.blocks.supervised import SLConfig
from configs.reading import yaml_text
from configs.reading.files import read_job
from configs.reading.load import ConfigError, load, method_for, run_directory, to_yaml
from configs.reading.renamed import RENAMED_KEYS
from configs.rules.every_job import warnings_for
from plugins.kinds import listed

MINIMAL = """
model: {path: models/x}
data: {sources: [{file: rows.jsonl}]}
algorithm: {name: grpo}
reward: {parts: [{function: last_number}]}
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(MINIMAL)
    return path


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, RLConfig, overrides)
    return str(caught.value)


def test_defaults_and_method_parameters_are_filled_in(minimal: Path) -> None:
    config = load(minimal, RLConfig)
    assert config.train.learning_rate == 1e-6 and config.rollout.responses_per_prompt == 8
    assert config.algorithm.params == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    method = method_for(config)
    assert type(method).__name__ == "GRPO" and method.params.clip_high == 0.2


@pytest.mark.parametrize("file", sorted(Path("configs").glob("*.yaml")), ids=str)
def test_shipped_files_load_and_round_trip(file: Path, tmp_path: Path) -> None:
    method = read_job(file)[0].get("algorithm", {}).get("name")
    schema: Any = EvalConfig if method is None else RLConfig if listed("method")[method].has_advantages else SLConfig
    config = load(file, schema)
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert load(again, schema) == config
    assert to_yaml(load(again, schema)) == to_yaml(config)


def test_a_methods_file_runs_it() -> None:
    for path in {Path("configs") / f"{name}.yaml" for name in listed("method")} & {*Path("configs").glob("*.yaml")}:
        name = path.stem
        config: Any = load(path, RLConfig if listed("method")[name].has_advantages else SLConfig)
        assert config.algorithm.name == config.run.name == name
        assert warnings_for(config) == []


def test_evaluation_uses_the_held_out_prompts_of_the_training_job() -> None:
    assert load("configs/eval.yaml", EvalConfig).data == load("configs/grpo.yaml", RLConfig).data


def test_method_parameters_are_beside_the_name_in_yaml(minimal: Path) -> None:
    written = yaml.safe_load(to_yaml(load(minimal, RLConfig, ["algorithm.clip_high=0.28"])))
    assert written["algorithm"] == {"name": "grpo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}


def test_unknown_keys_name_the_nearest(minimal: Path) -> None:
    text = message(
        minimal, "train.learning_rte=1", "train.lr=1", "rollout.learning_rate=1", "run.learning_rte=1", "trian.steps=1",
        "algorithm.clip_hgih=0.3", "data.sources.0.fle=x", "model.zzz=1",
    )  # fmt: skip
    for expected in (
        "train.learning_rte: unknown key; did you mean train.learning_rate?",
        "train.lr: unknown key; did you mean train.learning_rate?",
        "rollout.learning_rate: unknown key; did you mean critic.learning_rate or train.learning_rate?",
        "run.learning_rte: unknown key; did you mean critic.learning_rate or train.learning_rate?",
        "trian: unknown key; did you mean train?",
        "algorithm.clip_hgih: unknown key; did you mean algorithm.clip_high?",
        "data.sources.0.fle: unknown key; did you mean data.sources.0.file?",
        "model.zzz: unknown key; keys here: path, dtype, device",
    ):
        assert expected in text
    assert "8 problems" in text


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS.items())
def test_a_key_of_an_earlier_version_is_refused_with_its_new_name(minimal: Path, old: str, new: str) -> None:
    assert message(minimal, f"{old}=1").endswith(f"{old}: is now called {new}; rename the key (from the command line)")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=0", "train.steps: must be at least 1; given 0"),
        ("train.learning_rate=0", "train.learning_rate: must be above 0.0; given 0"),
        ("train.steps=1.5", "train.steps: must be a whole number; given 1.5"),
        ("train.steps=1e3", "train.steps: must be a whole number; given 1000.0; write 1000"),
        ("train.steps=true", "train.steps: must be a whole number; given true"),
        ("train.steps='8'", "train.steps: must be a whole number; given '8'"),
        ("train.learning_rate=fast", "train.learning_rate: must be a number; given 'fast'"),
        ("train.steps=.inf", "train.steps: must be a whole number; given inf"),
        ("train.steps=.nan", "train.steps: must be a whole number; given nan"),
        ("eval.max_prompts=1e9999", "eval.max_prompts: must be a whole number; given inf"),
        ("rollout.engines=1000000000", "rollout.engines: must be at most"),
        ("train.learning_rate=.nan", "train.learning_rate: must be a finite number; given nan"),
        ("train.learning_rate=.inf", "train.learning_rate: must be a finite number; given inf"),
        ("rollout.seeded=1", "rollout.seeded: must be true or false; given 1"),
        ("run.name=2024", "run.name: must be text; given 2024; put quotes around it"),
        ("run.name=a/b", "run.name: names one folder"),
        ("model.dtype=bfloat", "model.dtype: must be 'float32' or 'bfloat16'; given 'bfloat'; did you mean bfloat16?"),
        ("train.zero_stage=4", "train.zero_stage: must be 0, 1, 2 or 3; given 4"),
        ("train.betas=[0.9]", "train.betas.1: is missing"),
        ("train.betas=[0.9, 1.0]", "train.betas.1: must be below 1.0; given 1.0"),
        ("train=3", "train: must be a block of keys (learning_rate, schedule"),
        ("train=", "train: must be a block of keys (learning_rate, schedule"),
        ("algorithm=grpo", "algorithm: must be a block of keys (name"),
        ("algorithm={}", "algorithm.name: is missing"),
        ("algorithm.clip_low=1", "algorithm.clip_low: must be below 1.0; given 1"),
        (
            "algorithm={name: gspo, level: word}",
            "algorithm.level: must be 'sequence' or 'token'; given 'word'",
        ),
        ("algorithm.name=grop", "algorithm.name: method 'grop': there is no method of that name; did you mean grpo?"),
        ("algorithm.name=sft", "algorithm.name: 'sft' defines no advantage"),
        ("data.sources=[]", "data.sources: needs at least 1 item(s); given []"),
        ("data.sources.0.reasoning_gym=chain_sum", "data.sources.0: a data source names exactly one of"),
        ("data.sources.0.file=rows.csv", "data.sources.0: 'file' must end in .parquet"),
        ("data.sources.0.params={a: 1}", "data.sources.0: 'params' are arguments of a reasoning_gym generator"),
        ("model={}", "model.path: is missing: Folder in Hugging Face format, or a hub name."),
        ("rollout.stop=['']", "rollout.stop.0: must not be empty"),
    ],
)
def test_values_are_refused_with_what_is_allowed(minimal: Path, override: str, expected: str) -> None:
    text = message(minimal, override)
    assert expected in text
    assert "problems" not in text, "one mistake, one problem"


def test_all_mistakes_are_in_one_message_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(MINIMAL + "train:\n  steps: -1\n  learning_rte: 3e-5\n")
    text = message(path, "rollout.top_p=2")
    assert text.startswith(f"{path}: 3 problems\n")
    assert "train.steps: must be at least 1; given -1 (line 7)" in text
    assert "train.learning_rte: unknown key; did you mean train.learning_rate? (line 8)" in text
    assert "rollout.top_p: must be at most 1.0; given 2 (from the command line)" in text


ALIAS_BOMB = "a0: &a0 [x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)  # a billion values once written out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: {path: x\ntrain: 3\n", "line 2, column 6: no valid YAML"),
        ("model:\n\tpath: x\n", "line 2, column 1: no valid YAML"),
        ("model:\n  path: a: b\n", "line 2, column 10: no valid YAML"),
        ("run: {}\nmodel: {path: x}\nrun: {}\n", "line 3, column 1: no valid YAML: the key 'run' is given twice"),
        ("model:\n  path: x\n  path: y\n", "line 3, column 3: no valid YAML: the key 'path' is given twice"),
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("- 1\n", "holds a list"),
        ("a: &x\n  b: *x\n", "a value contains itself"),
        ("run: {name: !!python/name:os.system x}\n", "no valid YAML"),
        ("run: {name: 2024-13-45}\n", "put quotes around it"),
        ("a: 1\n---\nb: 2\n", "no valid YAML"),
        ("a: 1\nb: \x00\n", "line 2: no valid YAML"),
        ("1: 2\n", "1: keys are text; put quotes around it"),
        ("run: !!bool maybe\n", "no valid YAML value"),
        ("run: !!timestamp maybe\n", "no valid YAML value"),
        ("run: " + "[" * 3000, "nested too deep"),
        (ALIAS_BOMB, "it stands for more than 100,000 values"),
        (ALIAS_BOMB.replace("[", "{<<: [").replace("]", "]}"), "it stands for more than 100,000 values"),
    ],
)
def test_broken_yaml_names_file_and_place(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    found = message(path)
    assert str(path) in found and expected in found


def test_files_that_are_none(tmp_path: Path, minimal: Path) -> None:
    assert "there is no such file; did you mean" in message(tmp_path / "jobs.yaml")
    assert "is a folder" in message(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "is a pipe or device" in message(tmp_path / "pipe")
    (tmp_path / "latin.yaml").write_bytes("run: {name: caf\xe9}".encode("latin-1"))
    assert "no UTF-8 text" in message(tmp_path / "latin.yaml")


def test_scientific_numbers_without_a_dot_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(MINIMAL + "train: {learning_rate: 3e-5, eps: 1E-9, weight_decay: .5e0}\n")
    train = load(path, RLConfig).train
    assert (train.learning_rate, train.eps, train.weight_decay) == (3e-5, 1e-9, 0.5)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10), ("-08", -8), ("0x1F", 31), ("0o17", 15), ("1_000", 1000), ("1:30", "1:30"), ("1:30.5", "1:30.5"),
        ("0b101", "0b101"), ("1.5", 1.5), (".5", 0.5), ("7.", 7.0), ("-.inf", -math.inf), ("!!float 3", 3.0),
    ],
)  # fmt: skip
def test_numbers_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    read = yaml_text.parse(f"a: {text}", "here")[0]["a"]
    assert read == value and type(read) is type(value)
    if isinstance(value, str):
        assert yaml.safe_load(yaml_text.dump({"a": value})) == {"a": value}, "other readers get the text too"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps", "must be key=value"),
        ("=3", "must be key=value"),
        ("train..steps=3", "must be key=value"),
        ("train.steps.x=3", "train.steps is 100, which has no key 'x'"),
        ("data.sources.1.size=3", "data.sources is a list of 1; give an index from 0 to 0"),
        ("data.sources.first.size=3", "data.sources is a list of 1; give an index from 0 to 0"),
        ("train.betas=[0.9", "--set train.betas, line 1, column 5: no valid YAML"),
    ],
)
def test_override_mistakes(minimal: Path, override: str, expected: str) -> None:
    assert expected in message(minimal, "train.steps=100", override)


def test_overrides_reach_everywhere(minimal: Path) -> None:
    config = load(
        minimal, RLConfig,
        ["data.sources.0.prompt_column=question", "train.betas=[0.8, 0.95]", "rollout.engine.max_num_seqs=64",
         "data.system_prompt=a=b", "train.steps=5", "train.steps=7", "reward.parts.0.params={sign: true}"],
    )  # fmt: skip
    assert config.data.sources[0].prompt_column == "question"
    assert config.train.betas == (0.8, 0.95) and config.train.steps == 7
    assert config.rollout.engine == {"max_num_seqs": 64} and config.data.system_prompt == "a=b"
    assert config.reward.parts[0].params == {"sign": True}


def test_run_dir_replaces_folder_and_name(minimal: Path, tmp_path: Path) -> None:
    config = load(minimal, RLConfig, ["run.name=other"], run_dir=str(tmp_path / "here"))
    assert run_directory(config) == tmp_path / "here" and config.run.name == "here"
    assert run_directory(load(minimal, RLConfig, run_dir="plain")) == Path("plain")


def test_own_code_is_found_from_the_current_folder(minimal: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "my_own_lab.py").write_text(
        "from algs.method import MethodParams, PolicyMethod, param\n"
        "from algs.records import TokenLoss\n"
        "class Mine(PolicyMethod):\n"
        "    class Params(MethodParams):\n"
        "        reach: tuple[float, float] = param((0.1, 0.2), 'How far.')\n"
        "        depth: int\n"
        "        def __post_init__(self):\n"
        "            if self.reach[0] > self.reach[1]: raise ValueError('reach must rise')\n"
        "    def advantages(self, groups): return groups.rewards\n"
        "    def loss(self, t): return TokenLoss(-t.advantages * t.logprobs)\n"
    )
    (tmp_path / "my_broken_lab.py").write_text("def broken(:\n")
    monkeypatch.chdir(tmp_path)
    config = load(minimal, RLConfig, ["algorithm={name: 'my_own_lab:Mine', reach: [0.3, 0.4], depth: 2}"])
    assert method_for(config).params.reach == (0.3, 0.4)
    minimal.write_text(to_yaml(config))
    assert load(minimal, RLConfig) == config
    assert "algorithm.depth: is missing" in message(minimal, "algorithm={name: 'my_own_lab:Mine'}")
    assert "algorithm.name: method 'my_own_lab:Mine': reach must rise" in message(minimal, "algorithm.reach=[2, 1]")
    assert "does not import: SyntaxError" in message(minimal, "algorithm.name=my_broken_lab:Mine")


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150)
@given(PLAIN)
def test_what_is_dumped_reads_back_equal(value: Any) -> None:
    assert yaml_text.parse(yaml_text.dump(value), "test")[0] == value


@settings(max_examples=50)
@given(st.text(max_size=40))
def test_any_override_loads_or_ends_in_a_config_error(text: str) -> None:
    path = Path("configs/grpo.yaml")
    try:
        load(path, RLConfig, [text, f"run.name={text}"])
    except ConfigError:
        return
