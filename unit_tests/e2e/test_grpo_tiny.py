"""A user's own commands on the real stack: a run, an evaluation of what it made, a run that fails, Ctrl-C.

Each starts everything anew, so what can be seen without a command line is in test_jobs.py.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from orchestration.run.directory import checkpoints, read_metrics
from orchestration.run.samples import read_samples, sample_steps

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
MARK = "FEYNRL_TEST_RUN"  # an environment variable that every process of a run inherits
PHASES = ("generate", "reward", "train", "sync", "eval", "checkpoint")

pytestmark = pytest.mark.e2e


def started(*arguments, mark, **variables):
    """A command in a process group of its own, as a terminal starts it."""
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1", MARK: str(mark), **variables},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a background shell ignores it
    )  # fmt: skip


def started_rl(run, model, *settings, flags=(), **variables):
    sets = [
        f"model.path={model}",
        f"data.sources.0.file={model}/data/train.jsonl",
        f"data.heldout_sources.0.file={model}/data/heldout.jsonl",
        *settings,
    ]
    flags = [*flags, *(flag for setting in sets for flag in ("--set", setting))]
    main = ("main_rl.py", "--config", "configs/grpo_tiny.yaml", "--run-dir", str(run))
    return started(*main, *flags, mark=run, **variables)


@contextmanager
def ending(process):
    """Whatever happens in the block, the process is gone after it."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)


@pytest.fixture(scope="module")
def finished(tiny_model, tmp_path_factory):
    """A finished run and what it printed: two ranks under ZeRO-2, a reference policy, several micro-batches a step."""
    run = tmp_path_factory.mktemp("runs") / "tiny"
    settings = (
        f"train.steps={STEPS}",
        "train.ranks=2",
        "train.zero_stage=2",
        "train.max_tokens_per_micro_batch=150",
        "objective.kl.coef=0.001",
        "checkpoint.every=2",
    )
    with ending(started_rl(run, tiny_model, *settings)) as process:
        printed, errors = process.communicate(timeout=600)
    logs = "\n".join(f"== {p.name}\n{p.read_text()[-2000:]}" for p in (run / "logs").glob("*.log"))
    assert process.returncode == 0, f"{printed}\n{errors}\n{logs}"
    return run, printed


@pytest.fixture(scope="module")
def failing(finished, tiny_model, tmp_path_factory):
    """A run whose reward fails. It goes on beside the evaluation: most of both is imports, and there are two cores."""
    folder = tmp_path_factory.mktemp("failing")
    (folder / "broken_reward.py").write_text("def score(trajectory):\n    raise RuntimeError('the judge is out')\n")
    setting = "reward.parts.0.function=broken_reward:score"
    with ending(started_rl(folder / "run", tiny_model, setting, PYTHONPATH=str(folder))) as process:
        yield folder / "run", process


def test_every_promised_metric_is_there_and_time_adds_up(finished):
    last = read_metrics(finished[0])[-1]
    for name in (
        "reward/exact_match", "reward/pass_rate", "rollout/response_tokens", "rollout/truncated_share",
        "train/entropy_nats", "objective/kl_ref_nats", "method/clip_fraction", "train/gradient_norm", "train/learning_rate",
        "train/logprob_gap_mean", "train/staleness_mean", "rollout/tokens_per_second", "train/tokens_per_second",
    ):  # fmt: skip
        assert name in last
    parts = sum(last[f"time/{phase}_seconds"] for phase in PHASES) + last["time/other_seconds"]
    assert parts == pytest.approx(last["time/step_seconds"])
    assert 0 <= last["time/other_share"] < 0.2


def test_the_run_directory_holds_what_it_should(finished):
    run, printed = finished
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["ranks"] == 2
    assert json.loads((run / "environment.json").read_text())["packages"]["torch"]
    assert sample_steps(run) == list(range(1, STEPS + 1))
    assert len(read_samples(run, 1)) == 32 * 16
    assert (run / "report.html").stat().st_size > 10_000
    assert [p.name for p in checkpoints(run)] == ["step_000002", "step_000004"]
    for name in ("report.html", "samples", "checkpoints", f"step {STEPS}/{STEPS}"):
        assert name in printed


def marked_processes(run):
    """Processes that inherited the run's environment: of Ray, the engine, the trainer, the scoring."""
    found = []
    for process in psutil.process_iter(["pid", "name", "status"]):
        try:
            inherited = process.environ().get(MARK)
        except psutil.Error:  # gone meanwhile, or another user's
            continue
        if inherited == str(run) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.info)
    return found


def test_nothing_is_left_running(finished):
    assert not marked_processes(finished[0])


def test_the_checkpoint_loads_in_transformers_and_evaluates_in_vllm(finished, failing, tiny_model, tmp_path):
    """The evaluation's greedy accuracy of the checkpoint is the one the run logged at its end."""
    run, _ = finished
    checkpoint = checkpoints(run)[-1]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoTokenizer.from_pretrained(checkpoint).chat_template
    assert AutoModelForCausalLM.from_pretrained(checkpoint).num_parameters() > 400_000
    config = yaml.safe_load((ROOT / "configs" / "grpo_tiny.yaml").read_text())
    judged = {
        "model": {**config["model"], "path": str(checkpoint)},
        "data": {
            **config["data"],
            "sources": [{"file": f"{tiny_model}/data/train.jsonl"}],
            "heldout_sources": [{"file": f"{tiny_model}/data/heldout.jsonl"}],
        },
        "reward": config["reward"],
        "eval": {"samples_per_prompt": 4, "max_new_tokens": 8, "max_prompts": 200},
    }
    (tmp_path / "eval.yaml").write_text(yaml.safe_dump(judged))
    out = tmp_path / "judged"
    with ending(started("main_eval.py", "--config", str(tmp_path / "eval.yaml"), "--run-dir", str(out), mark=out)) as e:
        printed, errors = e.communicate(timeout=600)
    assert e.returncode == 0, printed + errors
    result = json.loads((out / "evaluation.json").read_text())
    logged = read_metrics(run)[-1]["eval/greedy_accuracy"]
    assert result["greedy_accuracy"]["mean"] == pytest.approx(logged, abs=0.011)
    assert result["pass_at_4"]["mean"] >= result["pass_at_1"]["mean"]
    assert len(read_samples(out, 1, heldout=True)) == 4 * result["prompts"]


def test_a_run_that_fails_says_why_and_leaves_its_log(failing):
    """A reward that fails on most responses stops the run with its first error, not with zeros."""
    run, process = failing
    printed, errors = process.communicate(timeout=600)
    assert process.returncode == 1, printed + errors
    assert "the judge is out" in errors
    assert "Traceback" not in printed + errors.split("the judge is out")[0]
    assert "Traceback" in (run / "logs" / "driver.log").read_text()
    assert not marked_processes(run)


def test_ctrl_c_ends_cleanly(tiny_model, tmp_path):
    """One line, exit code 130, whole files, a report, and no process left."""
    run = tmp_path / "run"
    with ending(started_rl(run, tiny_model, "train.steps=5000", "sync.method=disk")) as process:
        for line in process.stdout:
            if line.startswith("step 3/"):
                break
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the foreground group
        printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130, printed + errors
    assert "interrupted" in errors
    assert "Traceback" not in printed + errors
    assert [row["step"] for row in read_metrics(run)][:4] == [0, 1, 2, 3]
    assert (run / "report.html").exists()
    assert not list((run / "sync").glob("*"))
    for _ in range(100):
        if not marked_processes(run):
            break
        time.sleep(0.2)
    assert not marked_processes(run)
