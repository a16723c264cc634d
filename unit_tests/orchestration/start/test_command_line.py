"""main_rl.py as a user runs it: mistakes end early, with one message, exit code 2, no traceback and nothing written."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from configs.blocks.rl import RLConfig
from configs.reading.load import load, to_yaml
from main_rl import RL
from orchestration.run.directory import RunDirectory
from orchestration.run.resume import DriverState
from orchestration.start import command_line
from unit_tests.tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parents[3]
JOB = """
run: {name: job}
model: {path: tiny, dtype: float32, device: cpu}
data: {sources: [{file: rows.jsonl}], max_prompt_tokens: 64}
algorithm: {name: grpo}
rollout: {prompts_per_step: 4, responses_per_prompt: 4, max_new_tokens: 8}
reward: {parts: [{function: last_number}]}
train: {steps: 4}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    write_tiny_model(folder / "tiny")
    write_tiny_model(folder / "untalkative", chat_template=None)
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(5) for b in range(5)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "empty.jsonl").write_text("")
    (folder / "job.yaml").write_text(JOB)
    held = folder / "runs" / "held"
    held.mkdir(parents=True)
    (held / "config.yaml").write_text("the run that was here\n")
    return folder


def ran(folder: Path, *arguments: str, script: str = "main_rl.py") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / script), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def cpu_seconds() -> float:
    """Processor time of the programs run so far: what they take on a free machine, also while others use this one."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def contents(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["model.path=untalkative"], ["model.path", "untalkative", "no chat template", "chat_template.jinja"]),
        (["data.sources.0.prompt_column=question"], ["rows.jsonl", "'question'", "prompt_column"]),
        (["data.sources.0.file=empty.jsonl"], ["empty.jsonl", "holds no row"]),
        (["train.updates_per_step=3"], ["rollout.prompts_per_step", "train.updates_per_step 2 or 4"]),
        (["train.ranks=16", "rollout.engines=512"], ["train.ranks", "rollout.engines", "CPU cores"]),
        (["run.name=held"], ["run directory runs/held", "already holds a run", "--run-dir"]),
        (  # two at once: the model and the reward; both are in the one message
            ["model.path=models/none", "reward.parts.0.function=my_lab.rewards:score"],
            ["2 problems", "model.path", "models/none", "reward.parts.0", "my_lab.rewards:score", "no module my_lab"],
        ),
    ],
)
def test_bad_input(folder: Path, overrides: list[str], names: list[str]) -> None:
    before = contents(folder)
    sets = [word for override in overrides for word in ("--set", override)]
    started = cpu_seconds()
    done = ran(folder, "--config", "job.yaml", *sets)
    seconds = cpu_seconds() - started
    assert done.returncode == 2, done.stderr
    assert done.stdout == "" and done.stderr.startswith("error: ") and done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr
    for name in names:
        assert name in done.stderr
    assert contents(folder) == before, "nothing is written or overwritten"
    assert seconds < 15


def test_dry_run_prints_the_plan_and_writes_nothing(folder: Path) -> None:
    before = contents(folder)
    done = ran(folder, "--config", "job.yaml", "--dry-run", "--set", "rollout.top_p=0.9")
    assert done.returncode == 0 and done.stderr == ""
    for expected in ("plan of runs/job", "4 prompts x 4 responses = 16", "rollout.top_p: 0.9", "epochs"):
        assert expected in done.stdout
    assert contents(folder) == before


@pytest.mark.parametrize("script", ["main_rl.py", "main_eval.py"])
def test_help_teaches_quickly(folder: Path, script: str) -> None:
    started = cpu_seconds()
    done = ran(folder, "--help", script=script)
    seconds = cpu_seconds() - started
    assert done.returncode == 0 and done.stderr == ""
    for expected in ("--config FILE", "--dry-run", "examples:", "reward *", "docs/CONFIG.md"):
        assert expected in done.stdout
    assert ("grpo " in done.stdout) == (script == "main_rl.py")
    assert seconds < 1


def loaded(folder: Path, script: str, *arguments: str) -> set[str]:
    """The packages that the program has imported when it ends."""
    code = (
        "import atexit, runpy, sys\n"
        "atexit.register(lambda: print('\\nloaded', *{name.partition('.')[0] for name in sys.modules}))\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "sys.argv = sys.argv[2:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", code, str(ROOT), str(ROOT / script), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("\nloaded ")[2].split())


@pytest.mark.parametrize("script", ["main_rl.py", "main_sl.py", "main_eval.py"])
def test_help_loads_nothing_heavy(folder: Path, script: str) -> None:
    heavy = {"torch", "numpy", "transformers", "ray", "vllm", "deepspeed", "reasoning_gym", "rich"}
    assert loaded(folder, script, "--help") & heavy == set()


GENERATED = "data.sources=[{reasoning_gym: chain_sum, size: 200}, {reasoning_gym: products, size: 200}]"


def test_dry_run_loads_no_more_than_it_checks_with(folder: Path) -> None:
    """torch is there because the method is: checking its parameters runs its file."""
    heavy = {"transformers", "ray", "vllm", "deepspeed", "sympy", "matplotlib", "datasets", "pyarrow", "peft"}
    assert loaded(folder, "main_rl.py", "--config", "job.yaml", "--dry-run", "--set", GENERATED) & heavy == set()


def test_dry_run_is_quick(folder: Path) -> None:
    started = cpu_seconds()
    done = ran(folder, "--config", "job.yaml", "--dry-run", "--set", GENERATED)
    assert done.returncode == 0, done.stderr
    assert cpu_seconds() - started < 10, "it takes 3.5; a slow and busy machine may make that 7"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("    return None", "it is NoneType, not a number"),
        ("    return trajectory.prompt.columns['tests']", "KeyError: 'tests'"),
    ],
)
def test_dry_run_tries_the_reward_on_a_row(
    folder: Path, tmp_path: Path, body: str, said: str, monkeypatch: Any
) -> None:
    (tmp_path / "untried.py").write_text(f"def score(trajectory):\n{body}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = ran(folder, "--config", "job.yaml", "--dry-run", "--set", "reward.parts.0.function=untried:score")
    assert done.returncode == 2 and "Traceback" not in done.stderr.splitlines()[0], done.stderr
    assert "made-up response to prompt rows/0" in done.stderr and said in done.stderr


def test_dry_run_asks_no_judge(folder: Path) -> None:
    part = "{function: llm_judge, params: {base_url: 'http://127.0.0.1:9', model: m}}"
    done = ran(
        folder, "--config", "job.yaml", "--dry-run", "--set", f"reward.parts=[{part}, {{function: relative_length}}]"
    )
    assert done.returncode == 0, done.stderr
    assert "llm_judge asks a server, so it was not tried" in " ".join(done.stdout.replace("│", "").split())


def outcome(folder: Path, monkeypatch: Any, name: str, run: Any) -> int:
    monkeypatch.chdir(folder)
    previous = signal.getsignal(signal.SIGTERM)
    arguments = ["--config", "job.yaml", "--run-dir", str(folder / "outcomes" / name)]
    try:
        return command_line.main(dataclasses.replace(RL, run=run), arguments)
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_a_run_that_ends_well(folder: Path, monkeypatch: Any) -> None:
    seen = []
    assert outcome(folder, monkeypatch, "well", lambda *given: seen.append(given)) == 0
    ((config, prompts, directory),) = seen
    assert config.run.name == "well" and len(prompts.train) == 20
    assert (directory.path / "config.yaml").is_file()


def test_the_report_of_a_run_that_is_done_is_written_when_it_is_not_there(folder: Path, monkeypatch: Any) -> None:
    """It was killed between its last checkpoint and its report."""
    monkeypatch.chdir(folder)
    config = load("job.yaml", RLConfig, run_dir="runs/done")
    run = RunDirectory.create("runs/done", to_yaml(config))
    with run.checkpoint(config.train.steps) as checkpoint:
        DriverState(config.train.steps, 1, {}, {"train/loss": 0.25, "eval/accuracy": 0.5}).write(checkpoint)
    done = ran(folder, "--config", "job.yaml", "--resume", "runs/done")
    assert done.returncode == 0, done.stderr
    assert "runs/done is done" in done.stdout
    assert "train/loss" in (run.path / "report.html").read_text()


def test_a_bug_keeps_its_traceback_in_the_log(folder: Path, monkeypatch: Any, capsys: Any) -> None:
    def run(*given: Any) -> None:
        raise KeyError("weights")

    assert outcome(folder, monkeypatch, "bug", run) == 1
    shown = capsys.readouterr().err
    log = folder / "outcomes" / "bug" / "logs" / "driver.log"
    assert "failed: KeyError: 'weights'" in shown and str(log) in shown and "Traceback" not in shown
    assert "Traceback" in log.read_text() and "in run" in log.read_text()


def test_interruption(folder: Path, monkeypatch: Any, capsys: Any) -> None:
    def run(*given: Any) -> None:
        raise KeyboardInterrupt

    assert outcome(folder, monkeypatch, "interrupted", run) == 130
    assert "interrupted; what was done is in" in capsys.readouterr().err


def test_termination_is_an_interruption(folder: Path, monkeypatch: Any) -> None:
    assert outcome(folder, monkeypatch, "terminated", lambda *given: os.kill(os.getpid(), 15)) == 130
