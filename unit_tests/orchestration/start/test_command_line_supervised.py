"""main_sl.py as a user runs it: mistakes end early, with one message, exit code 2 and nothing written; launchers of ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from main_sl import SL
from orchestration.run.directory import RunDirectory, checkpoints, read_metrics
from orchestration.start import command_line
from unit_tests.tiny_model import write_tiny_model
from unit_tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent
STEPS = 120
JOB = {
    "run": {"name": "job"},
    "model": {"path": "tiny", "dtype": "float32", "device": "cpu"},
    "data": {"sources": [{"file": "rows.jsonl"}], "split_by": "row", "max_tokens": 64},
    "algorithm": {"name": "sft"},
    "train": {"batch_size": 4, "steps": STEPS, "zero_stage": 2},
    "checkpoint": {"every": 20},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("supervised_job")
    write_tiny_model(folder / "tiny")
    write_tiny_model(folder / "untalkative", chat_template=None)
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(5) for b in range(5)]
    rows[3]["answer"] = None
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "empty.jsonl").write_text("")
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    (folder / "runs" / "held").mkdir(parents=True)
    (folder / "runs" / "held" / "config.yaml").write_text("the run that was here\n")
    return folder


def ran(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "main_sl.py"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250)


def outcome(folder: Path, monkeypatch: Any, *arguments: str) -> int:
    """Exit code of the same in this process, which has its imports behind it."""

    def run(*given: Any) -> None:
        raise AssertionError("the job must not begin")

    monkeypatch.chdir(folder)
    previous = signal.getsignal(signal.SIGTERM)
    try:
        return command_line.main(dataclasses.replace(SL, run=run), arguments)
    finally:
        signal.signal(signal.SIGTERM, previous)


def contents(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (  # the schema's: all in one message
            ["train.learning_rat=1", "train.batch_size=0", "algorithm.name=sftt"],
            ["3 problems", "learning_rate", "train.batch_size", "sftt", "did you mean"],
        ),
        (["algorithm.name=grpo"], ["algorithm.name", "'grpo'", "main_rl.py"]),
        (  # those of the files
            ["model.path=models/none", "run.name=held"],
            ["2 problems", "model.path", "models/none", "run directory runs/held", "already holds a run", "--run-dir"],
        ),
        (["data.sources.0.file=none.jsonl"], ["none.jsonl", "no such file", "did you mean rows.jsonl?"]),
        (["data.sources.0.file=empty.jsonl"], ["empty.jsonl", "holds no row"]),
        (["data.bad_rows=error"], ["data.sources.0", "rows.jsonl line 4", "column 'answer' is empty"]),
        (["model.path=untalkative"], ["untalkative", "chat template"]),
        (["algorithm.name=dpo", "data.sources.0.chosen_column=better"], ["rows.jsonl", "better"]),
    ],
)
def test_bad_input(folder: Path, monkeypatch: Any, capsys: Any, overrides: list[str], names: list[str]) -> None:
    before = contents(folder)
    sets = [word for override in overrides for word in ("--set", override)]
    assert outcome(folder, monkeypatch, "--config", "job.yaml", *sets) == 2
    shown, said = capsys.readouterr()
    assert shown == "" and said.startswith("error: ") and said.count("error: ") == 1
    assert "Traceback" not in said and "Warning" not in said
    for name in names:
        assert name in said
    assert contents(folder) == before, "nothing is written or overwritten"


def test_a_damaged_checkpoint_is_no_model_to_begin_with(folder: Path, monkeypatch: Any, capsys: Any) -> None:
    with RunDirectory.create(folder / "runs/earlier", "").checkpoint(1) as partial:
        shutil.copytree(folder / "tiny", partial, dirs_exist_ok=True)
    begin = ["--config", "job.yaml", "--dry-run", "--set", "model.path=runs/earlier/checkpoints/step_000001"]
    assert outcome(folder, monkeypatch, *begin) == 0
    file = folder / "runs/earlier/checkpoints/step_000001/config.json"
    file.write_text(file.read_text()[:-9])
    assert outcome(folder, monkeypatch, *begin) == 2
    assert "step_000001/config.json has" in capsys.readouterr().err


def test_no_room_for_checkpoints(folder: Path, monkeypatch: Any, capsys: Any) -> None:
    usage = type(shutil.disk_usage("."))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 90, 10))
    assert outcome(folder, monkeypatch, "--config", "job.yaml") == 2
    assert "run.dir: checkpoints need" in capsys.readouterr().err and not (folder / "runs/job").exists()


def test_a_missing_file_as_from_a_shell(folder: Path) -> None:
    done = ran(folder, "--config", "none.yaml")
    assert (
        done.returncode == 2
        and done.stdout == ""
        and done.stderr.startswith("error: --config none.yaml: there is no such file")
    )
    assert "Traceback" not in done.stderr


def test_a_resumption_of_nothing(folder: Path, monkeypatch: Any, capsys: Any) -> None:
    assert outcome(folder, monkeypatch, "--config", "job.yaml", "--resume", "runs/none") == 2
    assert "runs/none holds no run" in capsys.readouterr().err and not (folder / "runs/none").exists()
    with pytest.raises(SystemExit):
        outcome(folder, monkeypatch, "--config", "job.yaml", "--resume", "runs/a", "--run-dir", "runs/b")
    assert "name two folders" in capsys.readouterr().err


def test_dry_run_prints_the_plan_and_writes_nothing(folder: Path) -> None:
    before = contents(folder)
    done = ran(folder, "--config", "job.yaml", "--dry-run", "--set", "train.epochs=2")
    assert done.returncode == 0, done.stderr
    assert "warning: train.epochs: has no effect beside train.steps" in done.stdout + done.stderr
    for expected in ("runs/job (sft)", "4 examples over 1 rank(s), ZeRO 2", f"{STEPS} optimizer steps", "1 bad"):
        assert expected in done.stdout
    assert contents(folder) == before


def test_help_teaches(folder: Path) -> None:
    done = ran(folder, "--help")
    assert done.returncode == 0 and done.stderr == ""
    for expected in (
        "--config FILE",
        "--resume [FOLDER]",
        "--dry-run",
        "examples:",
        "data *",
        "dpo ",
        "docs/CONFIG.md",
    ):
        assert expected in done.stdout
    assert "grpo " not in done.stdout and "local_rank" not in done.stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launched(folder: Path, launcher: str, *arguments: str) -> subprocess.Popen[str]:
    """main_sl.py on two ranks, in a process group of its own."""
    own = {
        "torchrun": ["--nproc_per_node", "2", "--master_port", str(free_port())],
        "deepspeed": ["--num_accelerators", "2", "--master_port", str(free_port())],
    }[launcher]
    command = [str(BIN / launcher), *own, str(ROOT / "main_sl.py"), "--config", "job.yaml", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> str:
    shown, _ = process.communicate(timeout=280)
    assert process.returncode == 0, shown
    return shown


def whole_job(folder: Path) -> Path:
    """Return a folder with the job alone, its paths absolute: who runs it is elsewhere."""
    model, data = {**JOB["model"], "path": str(folder / "tiny")}, {**JOB["data"]}
    data["sources"] = [{"file": str(folder / "rows.jsonl")}]
    (folder / "whole").mkdir()
    (folder / "whole/job.yaml").write_text(yaml.safe_dump({**JOB, "model": model, "data": data}))
    return folder / "whole"


def numbers(run: Path) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if not name.startswith("time/") and "per_second" not in name}
        for row in read_metrics(run)
    ]


@pytest.mark.ranks
def test_two_ranks_by_either_launcher_killed_and_resumed(
    folder: Path, monkeypatch: Any, capsys: Any, rank_groups: dict[int, Any]
) -> None:
    """Begun by torchrun, all of it killed, resumed by deepspeed; against what the session's two ranks do undisturbed. Alone
    catches a launcher whose ranks do not find each other, and a resumption on several ranks with other numbers."""
    rank_groups[2].run("unit_tests.orchestration.ranks.supervised_rank", whole_job(folder))
    killed = launched(folder, "torchrun", "--run-dir", "runs/killed")

    def is_there() -> bool:
        assert killed.poll() is None, killed.communicate()[0]
        return any(row["step"] >= 25 for row in read_metrics(folder / "runs/killed"))

    wait_for(is_there, "step 25 is done", every_seconds=0.01)
    ranks = psutil.Process(killed.pid).children(recursive=True)
    for rank in ranks:
        rank.suspend()
    killed.kill()  # its ranks stay, each in a session of its own
    resume = ["--config", "job.yaml", "--resume", "runs/killed"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert outcome(folder, monkeypatch, *resume) == 2
    assert "/runs/killed is still being written by a process of this run" in capsys.readouterr().err
    for rank in ranks:
        rank.kill()
    killed.communicate()
    assert len(read_metrics(folder / "runs/killed")) <= STEPS
    monkeypatch.delenv("WORLD_SIZE")
    assert outcome(folder, monkeypatch, *resume) == 2
    assert "written by 2 trainer rank(s), now there are 1; use 2" in capsys.readouterr().err
    shown = ended(launched(folder, "deepspeed", "--resume", "runs/killed"))
    assert shown.count(f"resuming from {folder}/runs/killed/checkpoints/step_0000") == 1, (
        "the first rank speaks for all"
    )
    assert shown.count("held-out loss ") >= 1
    whole = folder / "whole/runs_2/job"
    assert numbers(folder / "runs/killed") == numbers(whole)
    one, two = (checkpoints(run)[-1] / "model.safetensors" for run in (folder / "runs/killed", whole))
    assert one.read_bytes() == two.read_bytes()
