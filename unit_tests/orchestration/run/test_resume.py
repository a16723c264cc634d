"""Resuming is exact: trainers on one rank and two, whole supervised jobs ended in the middle, and the run directory."""

import dataclasses
import json
import math
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from configs.blocks.rl import RLConfig
from configs.blocks.supervised import SLConfig
from configs.reading.load import ConfigError, load, to_yaml
from orchestration.run.directory import RunDirectory, checkpoints, read_metrics, state_folder
from orchestration.run.resume import (
    DriverState,
    changed_keys,
    newest_resumable,
    opened_to_resume,
    owes_evaluation,
    restore_run,
    resume_run,
    trainer_folder,
)
from orchestration.run.samples import read_samples, sample_steps
from orchestration.start.command_line import _took_up_what_is_done
from unit_tests.orchestration.ranks.resume_rank import CASES, SAVED_AFTER, STEPS
from unit_tests.orchestration.step_debugger.captured_steps import packed
from unit_tests.tiny_model import write_tiny_model
from unit_tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[3]
SL_STEPS, EVERY = 90, 15


@pytest.fixture(scope="module")
def trained(tmp_path_factory, rank_groups):
    """What one rank and two did live, and again from the saved state."""
    folder = tmp_path_factory.mktemp("resume")
    torch.manual_seed(0)
    write_tiny_model(folder / "model")
    for ranks in (1, 2):
        (folder / f"packed_{ranks}.pkl").write_bytes(pickle.dumps(packed(ranks)))
        rank_groups[ranks].run("unit_tests.orchestration.ranks.resume_rank", folder)
    return folder


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(a[n] == b[n] or (math.isnan(a[n]) and math.isnan(b[n])) for n in a)


@pytest.mark.parametrize("case", CASES)
def test_a_trainer_goes_on_to_the_last_bit(trained, case):
    for rank in range(CASES[case][0]):
        live, resumed = torch.load(trained / f"{case}_{rank}.pt", weights_only=False)
        assert len(live) == STEPS and len(resumed) == STEPS - SAVED_AFTER
        for step, (one, two) in enumerate(zip(live[SAVED_AFTER:], resumed, strict=True), SAVED_AFTER + 1):
            assert same(one[0], two[0]), f"metrics of step {step}"
            for a, b in ((one[1], two[1]), (one[2], two[2])):
                assert a.keys() == b.keys()
                assert all(torch.equal(a[n], b[n]) for n in a), f"weights after step {step}"
            assert one[3] == two[3] and torch.equal(one[4], two[4])
        before, after = live[SAVED_AFTER - 1][1], live[-1][1]
        assert all(not torch.equal(before[n], after[n]) for n in before if "norm" not in n), (
            "the steps change something"
        )


def test_a_state_that_does_not_fit_is_refused(trained):
    for rank in range(2):
        assert "holds no trainer state" in (trained / f"absent_{rank}.txt").read_text()
        assert "written by 1 trainer ranks, now there are 2" in (trained / f"one_zero0_{rank}.txt").read_text()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """A folder with a model, data and the configuration dpo.yaml, to be run from there."""
    folder = tmp_path_factory.mktemp("jobs")
    torch.manual_seed(0)
    write_tiny_model(folder / "model")
    sums = [(f"{a} + {b} =", str(a + b)) for a in range(7) for b in range(5)]
    rows = [{"prompt": q, "chosen": a, "rejected": f"{(int(a) + 3) % 20} {a}"} for q, a in sums]
    rows.append({**rows[0], "prompt": "1 + 1 = " * 40})  # found to be too long when it comes up
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": {"path": str(folder / "model"), "dtype": "float32", "device": "cpu"},
        "data": {"sources": [{"file": str(folder / "pairs.jsonl")}], "split_by": "row", "max_tokens": 64},
        "algorithm": {"name": "dpo"},
        "train": {"batch_size": 5, "steps": SL_STEPS, "learning_rate": 0.003, "schedule": "cosine"},
        "eval": {"every": 10},
        "checkpoint": {"every": EVERY},
    }
    (folder / "dpo.yaml").write_text(yaml.safe_dump(config))
    return folder


def started(folder: Path, *arguments: str) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "main_sl.py"), *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def ended(process: subprocess.Popen) -> str:
    shown, _ = process.communicate(timeout=200)
    assert process.returncode == 0, shown
    return shown


def interrupted_after(process: subprocess.Popen, run: Path, step: int) -> str:
    """Ask the process to end once the run has written the line of `step`; return what it showed."""

    def is_there() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return any(row["step"] >= step for row in read_metrics(run))

    wait_for(is_there, f"step {step} is done", every_seconds=0.002)
    process.send_signal(signal.SIGTERM)
    shown, _ = process.communicate(timeout=100)
    assert process.returncode == 130, shown
    return shown


def numbers(run: Path) -> list[dict[str, float]]:
    """The run's lines without what a clock says."""
    return [
        {name: value for name, value in row.items() if not name.startswith("time/") and "per_second" not in name}
        for row in read_metrics(run)
    ]


@pytest.mark.ranks
def test_a_job_interrupted_and_resumed_has_the_numbers_of_one_never_interrupted(jobs, rank_groups):
    """Alone catches a preference job whose order, reference or counters a resumption changes (test_command_line_supervised:
    sft, on two ranks). The one never killed is done by the session's rank."""
    rank_groups[1].run("unit_tests.orchestration.ranks.supervised_rank", jobs)
    whole, run = jobs / "runs_1/dpo", jobs / "runs/killed"
    shown = interrupted_after(started(jobs, "--config", "dpo.yaml", "--run-dir", "runs/killed"), run, step=EVERY + 2)
    assert f"go on: python main_sl.py --config dpo.yaml --resume {run}\n" in shown
    checkpoint = newest_resumable(RunDirectory.opened(run))
    step = DriverState.read(checkpoint).step
    assert EVERY + 2 <= step == read_metrics(run)[-1]["step"] < SL_STEPS, "the step under way, and nothing is lost"
    shown = ended(started(jobs, "--config", "dpo.yaml", "--resume", "runs/killed"))
    assert (
        f"resuming from {run.absolute()}/checkpoints/{checkpoint.name}: step {step + 1} of {SL_STEPS} is next" in shown
    )
    expected = numbers(whole)
    assert [row["step"] for row in expected] == list(range(SL_STEPS + 1))
    assert numbers(run) == expected
    weights = [checkpoints(path)[-1] / "model.safetensors" for path in (run, whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert expected[-1]["data/left_out/pairs"] == 1, "the row that is too long"
    assert [state_folder(path).exists() for path in checkpoints(run)] == [True, True], (
        "the older one can be resumed too"
    )
    assert not list((run / "checkpoints").rglob("*.pt")), "a checkpoint is a model folder, without pickles"
    noted = json.loads((run / "environment.json").read_text())
    assert noted["resumed"][0]["step"] == step


def made_run(jobs: Path, tmp_path: Path, steps: int = 4, *overrides: str) -> tuple[RunDirectory, SLConfig]:
    """A run directory of dpo.yaml as one killed after `steps` steps leaves it, with the checkpoint of step 2."""
    config = load(jobs / "dpo.yaml", SLConfig, overrides, str(tmp_path / "run"))
    run = RunDirectory.create(tmp_path / "run", to_yaml(config))
    for step in range(steps + 1):
        if step == 2:
            with run.checkpoint(step) as folder:
                DriverState(step, 1, {}, {"train/loss": 0.25, "train/gradient_norm": math.inf}).write(folder)
        run.write_metrics(step, {"train/loss": step / 8})
        run.write_samples(step, [])
        run.write_samples(step, [], heldout=True)
        (run.path / "captured_steps" / f"step_{step:06d}_update_0").mkdir(parents=True)
    return run, config


def test_the_run_directory_goes_back_to_its_checkpoint(jobs, tmp_path):
    run, config = made_run(jobs, tmp_path)
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "train/lo')  # cut off by the kill
    state = restore_run(run, newest_resumable(run), config)
    assert state.step == 2
    assert read_metrics(run.path) == [{"step": n, "train/loss": n / 8} for n in range(3)]
    assert sample_steps(run.path) == sample_steps(run.path, heldout=True) == [0, 1, 2]
    assert sorted(path.name for path in (run.path / "captured_steps").iterdir()) == [
        f"step_00000{n}_update_0" for n in range(3)
    ]
    assert read_samples(run.path, 2) == []


def test_a_line_that_the_kill_prevented_is_written_from_the_checkpoint(jobs, tmp_path):
    run, config = made_run(jobs, tmp_path)
    metrics = run.path / "metrics.jsonl"
    metrics.write_text("".join(line + "\n" for line in metrics.read_text().splitlines()[:2]))  # of steps 0 and 1
    restore_run(run, newest_resumable(run), config)
    assert read_metrics(run.path)[-1] == {"step": 2, "train/loss": 0.25, "train/gradient_norm": math.inf}


@pytest.mark.parametrize("is_judged", [False, True])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_step_that_was_trained_and_not_judged_is_not_done(tmp_path, step, is_judged, capsys):
    """Its line comes when it is judged, which is due after the second and the fourth, the last one."""
    sets = ["train.steps=4", "eval.every=2"]
    config = load(ROOT / "configs/grpo_tiny.yaml", RLConfig, sets, str(tmp_path / "run"))
    run = RunDirectory.create(tmp_path / "run", to_yaml(config))
    for earlier in range(step):
        run.write_metrics(earlier, {"eval/accuracy": 0.5})
    metrics = {"train/loss": 0.25, **({"eval/accuracy": 0.75} if is_judged else {})}
    with run.checkpoint(step) as folder:
        DriverState(step, 1, {}, metrics, accuracies=[0.5]).write(folder)
    run.resumed_from = newest_resumable(run)
    is_owed = not is_judged and step != 1
    assert _took_up_what_is_done(config, config.train.steps, run) is (step == 4 and is_judged)
    assert ("is done" in capsys.readouterr().out) is (step == 4 and is_judged)
    assert owes_evaluation(run, DriverState.read(run.resumed_from), config) is is_owed
    assert [row["step"] for row in read_metrics(run.path)] == list(range(step if is_owed else step + 1))
    if is_owed:
        run.write_metrics(step, {"train/loss": 0.25, "eval/accuracy": 0.75})
        assert not owes_evaluation(run, DriverState.read(run.resumed_from), config), "its line is there"


def test_the_newest_two_checkpoints_keep_their_state(jobs, tmp_path):
    run, _ = made_run(jobs, tmp_path)
    for step in (4, 5):
        with run.checkpoint(step) as folder:
            (trainer_folder(folder)).mkdir(parents=True)
            DriverState(step, 1, {}, {}).write(folder)
    for left in (".step_000002.removing", ".step_000009.partial", "step_000008"):  # of processes that were killed
        (run.path / "resume" / left).mkdir()
    run.prune_checkpoints(keep=3)
    assert [state_folder(path).is_dir() for path in checkpoints(run.path)] == [False, True, True]
    with run.checkpoint(6):
        pass
    run.prune_checkpoints(keep=3)
    assert sorted(path.name for path in (run.path / "resume").iterdir()) == ["step_000004", "step_000005"]
    assert newest_resumable(run) is None, "the newest is the one that counts"


def refused(run: RunDirectory, config: SLConfig, ranks: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        opened_to_resume(config, ranks)
    return str(caught.value)


def test_what_would_change_the_numbers_is_refused_by_name(jobs, tmp_path):
    run, config = made_run(jobs, tmp_path)
    assert opened_to_resume(config, 1).resumed_from == run.path / "checkpoints/step_000002"
    other = load(jobs / "dpo.yaml", SLConfig, ["train.learning_rate=1", "data.sources.0.weight=2"], str(run.path))
    said = refused(run, other)
    assert (
        "differs from" in said
        and "in data.sources.0.weight, train.learning_rate," in said
        and "begin a new run" in said
    )
    said = refused(run, config, ranks=2)
    assert "was written by 1 trainer rank(s), now there are 2; use 1" in said
    longer = load(jobs / "dpo.yaml", SLConfig, ["train.steps=99"], str(run.path))
    assert "in train.steps," in refused(run, longer), "the learning rate would have been another all along"


def test_a_run_of_an_earlier_version_is_refused_with_what_to_change(jobs, tmp_path):
    run, config = made_run(jobs, tmp_path)
    file = run.path / "config.yaml"
    file.write_text(file.read_text().replace("capture:", "replay:"))
    said = refused(run, config)
    assert "this version of FeynRL does not accept the run's own configuration" in said
    assert f"{file}: replay: is now called capture; rename the key (line " in said
    assert f"begin a new run with model.path={run.path / 'checkpoints/step_000002'}" in said


def test_a_longer_run_at_a_constant_rate_is_the_same_run(jobs, tmp_path):
    run, _ = made_run(jobs, tmp_path, 4, "train.schedule=constant")
    keys = ["train.schedule=constant", "train.steps=99", "checkpoint.keep=7", "eval.every=1", "run.name=x"]
    longer = load(jobs / "dpo.yaml", SLConfig, keys, str(run.path))
    opened = opened_to_resume(longer, 1)
    assert resume_run(opened, longer) == []
    assert load(run.path / "config.yaml", SLConfig).train.steps == 99


def test_another_machine_is_told_of(jobs, tmp_path):
    run, config = made_run(jobs, tmp_path)
    file = run.path / "environment.json"
    noted = json.loads(file.read_text())
    file.write_text(json.dumps({**noted, "cpus": 640}))
    (said,) = resume_run(opened_to_resume(config, 1), config)
    assert "cpus were 640, now" in said and "last digits" in said
    assert resume_run(opened_to_resume(config, 1), config) == [], "compared with the last time it began"


def test_nothing_to_go_on_from(jobs, tmp_path):
    config = load(jobs / "dpo.yaml", SLConfig, run_dir=str(tmp_path / "none"))
    assert "holds no run" in refused(None, config) and "leave --resume away" in refused(None, config)
    run = RunDirectory.create(tmp_path / "none", to_yaml(config))
    assert "has no checkpoint to go on from" in refused(run, config)
    with run.checkpoint(1):
        pass
    assert "step_000001 holds weights only" in refused(run, config)


def test_keys_are_compared_to_the_leaves(jobs):
    one = load(jobs / "dpo.yaml", SLConfig)
    assert changed_keys(one, one) == []
    two = load(jobs / "dpo.yaml", SLConfig, ["lora={rank: 4}", "data.sources=[{file: a.jsonl}, {file: b.jsonl}]"])
    assert {"lora", "lora.rank", "data.sources.0.file", "data.sources.1.file"} <= set(changed_keys(one, two))


def test_a_state_is_json_and_comes_back_equal(tmp_path):
    state = DriverState(3, 2, {"position": 5}, {"train/loss": 0.1 + 0.2}, 7, [0.5], [{"prompt": "é"}])
    state.write(tmp_path / "checkpoints/step_000003")
    assert DriverState.read(tmp_path / "checkpoints/step_000003") == state and dataclasses.asdict(state)["version"] == 7
