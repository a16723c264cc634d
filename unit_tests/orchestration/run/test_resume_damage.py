"""Damage to any file of a run is named, and a resumption goes on from the checkpoint before, or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from configs.blocks.supervised import SLConfig
from configs.reading.load import ConfigError, load, to_yaml
from orchestration.run import resume
from orchestration.run.checksums import Damaged, check_checkpoint, check_parts
from orchestration.run.directory import RunDirectory, read_metrics, state_folder
from orchestration.run.resume import DriverState, opened_to_resume, resume_run

MODEL = ("model.safetensors", "config.json", "tokenizer.json", "adapter/adapter_model.safetensors", "checkpoint.json")
STATE = ("driver.json", "trainer/rank_0.pt", "trainer/policy/zero_pp_rank_0_mp_rank_00_optim_states.pt")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(bytes(data))


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def garble(path: Path) -> None:
    path.write_text("[]")


DAMAGES = (cut, flip, zero, garble, Path.unlink)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of the steps 1 and 2, stopped after step 3."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "job.yaml").write_text(
        yaml.safe_dump(
            {
                "model": {"path": "m"},
                "data": {"sources": [{"file": "a.jsonl"}]},
                "algorithm": {"name": "sft"},
                "train": {"steps": 9},
            }
        )
    )
    config = load(folder / "job.yaml", SLConfig, run_dir=str(folder / "run"))
    run = RunDirectory.create(folder / "run", to_yaml(config))
    for step in range(4):
        if step in (1, 2):
            with run.checkpoint(step) as checkpoint:
                DriverState(step, 1, {"position": step}, {"train/loss": 0.25}).write(checkpoint)
                for name in (*MODEL, *STATE):
                    path = (checkpoint if name in MODEL else state_folder(checkpoint)) / name
                    if name not in ("checkpoint.json", "driver.json"):
                        path.parent.mkdir(parents=True, exist_ok=True)
                        path.write_text(json.dumps({"of": [step, name]}))
        run.write_metrics(step, {"train/loss": step / 8})
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(whole / "run", tmp_path / "run")
    provenance = json.loads((whole / "run/environment.json").read_text())
    monkeypatch.setattr(resume, "describe_provenance", lambda: provenance)  # it takes longest
    return tmp_path / "run"


def resumed(run: Path) -> tuple[str, list[str]]:
    """Return the name of the checkpoint that a resumption goes on from, and its warnings."""
    config = load(run / "config.yaml", SLConfig, run_dir=str(run))
    opened = opened_to_resume(config, 1)
    assert opened.resumed_from is not None
    return opened.resumed_from.name, resume_run(opened, config)


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def test_a_whole_run_is_resumed_without_a_word(run: Path) -> None:
    assert resumed(run) == ("step_000002", [])
    assert resumed(run) == ("step_000002", []), "and once more"


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [*(f"checkpoints/N/{n}" for n in MODEL), *(f"resume/N/{n}" for n in STATE)])
def test_a_damaged_checkpoint_is_named_set_aside_and_the_one_before_used(run: Path, name: str, damage) -> None:
    damage(run / name.replace("N", "step_000002"))
    used, (said,) = resumed(run)
    assert used == "step_000001" and name.replace("N", "step_000002") in said
    assert "step_000002 is damaged and was set aside as step_000002.damaged" in said
    assert [row["step"] for row in read_metrics(run)] == [0, 1]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step_000001", "step_000002.damaged"]
    assert sorted(p.name for p in (run / "resume").iterdir()) == ["step_000001", "step_000002.damaged"]
    with RunDirectory.opened(run).checkpoint(2):
        pass  # the step can be written again


@pytest.mark.parametrize(
    "name", ["checkpoints/N/model.safetensors", "resume/N/trainer/rank_0.pt", "checkpoints/N/checkpoint.json"]
)
def test_when_no_checkpoint_is_whole_each_is_named_and_nothing_is_written(run: Path, name: str) -> None:
    for step in ("step_000001", "step_000002"):
        cut(run / name.replace("N", step))
    before = contents(run)
    with pytest.raises(ConfigError, match="no checkpoint is whole") as caught:
        resumed(run)
    assert all(name.replace("N", step) in str(caught.value) for step in ("step_000001", "step_000002"))
    assert contents(run) == before


def test_an_emptied_checkpoint_and_a_lost_state(run: Path) -> None:
    shutil.rmtree(run / "checkpoints/step_000002")
    (run / "checkpoints/step_000002").mkdir()
    used, (said,) = resumed(run)
    assert used == "step_000001" and "step_000002/checkpoint.json is missing" in said
    shutil.rmtree(run / "resume/step_000001")
    with pytest.raises(ConfigError, match=r"its state .*resume/step_000001 is missing"):
        resumed(run)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_metrics_are_named_and_their_whole_lines_kept(run: Path, damage) -> None:
    damage(run / "metrics.jsonl")
    used, (said,) = resumed(run)
    assert used == "step_000002" and "metrics.jsonl is" in said
    assert (run / "metrics.jsonl.damaged").exists() is (damage is not Path.unlink)
    assert all(row["step"] <= 2 for row in read_metrics(run))


@pytest.mark.parametrize("damage", [cut, zero, garble])
@pytest.mark.parametrize("name", ["environment.json", "config.yaml"])
def test_a_damaged_file_of_the_run_is_named_and_nothing_is_written(run: Path, name: str, damage) -> None:
    config = load(run / "config.yaml", SLConfig, run_dir=str(run))
    damage(run / name)
    before = contents(run)
    with pytest.raises(ConfigError, match=name):
        opened_to_resume(config, 1)
    assert contents(run) == before


@pytest.mark.parametrize("damage", DAMAGES[:-1])
@pytest.mark.parametrize("name", MODEL)
def test_a_damaged_checkpoint_is_no_model(run: Path, name: str, damage) -> None:
    checkpoint = run / "checkpoints/step_000002"
    assert check_checkpoint(checkpoint) and not check_checkpoint(run)
    damage(checkpoint / name)
    with pytest.raises(Damaged, match=name):
        check_checkpoint(checkpoint)


def test_a_part_that_another_machine_kept_is_missed(tmp_path: Path) -> None:
    (tmp_path / "here").write_bytes(b"123")
    check_parts(tmp_path, [{"here": 3}, {}])
    with pytest.raises(
        ValueError, match=r"trainer rank 1 wrote .*/policy/rank_1.pt with 9 bytes, and here it is missing"
    ):
        check_parts(tmp_path, [{"here": 3}, {"policy/rank_1.pt": 9}])
    with pytest.raises(ValueError, match="with 4 bytes, and here it has 3; put the run directory"):
        check_parts(tmp_path, [{"here": 4}])
