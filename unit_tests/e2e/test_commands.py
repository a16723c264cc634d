"""A user's own commands on the real stack: two runs at once, an evaluation, killed processes, a resumption, Ctrl-C.

Each starts everything anew, so what can be seen without a command line is in test_jobs.py.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import yaml

from orchestration.run.checksums import read_marker
from orchestration.run.directory import checkpoints, read_metrics
from orchestration.run.samples import read_samples, sample_steps
from unit_tests.waiting import PATIENCE_SECONDS, is_alive, wait_for

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
    """Two runs begun at the same moment and finished, and what the first printed: two ranks under ZeRO-2, a reference policy,
    several micro-batches a step. The other one is small."""
    runs = [tmp_path_factory.mktemp("runs") / name for name in ("tiny", "other")]
    settings = (
        f"train.steps={STEPS}",
        "train.ranks=2",
        "train.zero_stage=2",
        "train.max_tokens_per_micro_batch=150",
        "objective.kl.coef=0.001",
        "checkpoint.every=2",
    )
    small = (
        "train.steps=2",
        "rollout.prompts_per_step=4",
        "rollout.responses_per_prompt=4",
        "eval.every=0",
        "eval.max_prompts=2",
    )
    with (
        ending(started_rl(runs[0], tiny_model, *settings)) as tiny,
        ending(started_rl(runs[1], tiny_model, *small)) as other,
    ):
        printed, errors = tiny.communicate(timeout=2 * PATIENCE_SECONDS)
        assert tiny.returncode == 0, f"{printed}\n{errors}\n{logs_of(runs[0])}"
        said, errors = other.communicate(timeout=PATIENCE_SECONDS)
        assert other.returncode == 0, f"{said}\n{errors}\n{logs_of(runs[1])}"
    return *runs, printed


def logs_of(run):
    return "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in (run / "logs").glob("*.log"))


def marked_processes(run):
    """Return the processes that inherited the run's environment: of Ray, the engine, the trainer, the scoring."""
    found = []
    for process in psutil.process_iter(["pid", "name", "status"]):
        try:
            inherited = process.environ().get(MARK)
        except psutil.Error:  # gone meanwhile, or another user's
            continue
        if inherited == str(run) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.info)
    return found


def open_to_the_network(driver):
    """What of a run listens on more than the loopback interface."""
    found = []
    for process in (psutil.Process(driver), *psutil.Process(driver).children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN and not connection.laddr.ip.endswith("127.0.0.1"):
                    found.append((process.name(), connection.laddr))
    return found


def test_every_promised_metric_is_there_and_time_adds_up(finished):
    """Alone catches a metric of the pages that no real run has, and seconds of a step that no phase has."""
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
    """Alone catches a file of a run directory that the command does not write."""
    run, _, printed = finished
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["ranks"] == 2
    assert json.loads((run / "environment.json").read_text())["packages"]["torch"]
    assert sample_steps(run) == list(range(1, STEPS + 1))
    assert len(read_samples(run, 1)) == 32 * 16
    assert (run / "report.html").stat().st_size > 10_000
    assert [p.name for p in checkpoints(run)] == ["step_000002", "step_000004"]
    for name in ("report.html", "samples", "checkpoints", f"step {STEPS}/{STEPS}"):
        assert name in printed


def test_two_runs_begun_at_the_same_moment_do_not_meet(finished):
    """Alone catches ports, Ray sessions or shared memory that two runs on one machine have in common; and what is left of
    them."""
    run, other, _ = finished
    rows = read_metrics(other)
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in [*rows, *read_metrics(run)]:
        assert row["sync/probe_gap_max"] < 1e-3, "its engine took another run's weights"
    assert [path.name for path in checkpoints(other)] == ["step_000002"]
    assert not marked_processes(run) and not marked_processes(other)


def test_the_checkpoint_loads_in_transformers_and_evaluates_in_vllm(finished, tiny_model, tmp_path):
    """Alone catches an evaluation whose greedy accuracy of a checkpoint is not the one the run logged at its end."""
    run = finished[0]
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
        printed, errors = e.communicate(timeout=PATIENCE_SECONDS)
    assert e.returncode == 0, printed + errors
    result = json.loads((out / "evaluation.json").read_text())
    logged = read_metrics(run)[-1]["eval/greedy_accuracy"]
    assert result["greedy_accuracy"]["mean"] == pytest.approx(logged, abs=0.011)
    assert result["pass_at_4"]["mean"] >= result["pass_at_1"]["mean"]
    assert len(read_samples(out, 1, heldout=True)) == 4 * result["prompts"]


def test_a_run_outlives_its_engine_a_rank_and_its_driver_and_ends_by_ctrl_c(tiny_model, tmp_path):
    """Alone catches a command that does not begin again by itself when a trainer rank is lost; a process, even a frozen one, that
    outlives its driver; anything of a run that the network can reach; a command with --resume that does not go on; and Ctrl-C that leaves a process, a traceback or half a
    file."""
    run = tmp_path / "run"
    settings = (
        "train.steps=10000", "train.ranks=2", "rollout.prompts_per_step=16", "rollout.responses_per_prompt=8", "eval.every=0",
        "checkpoint.every=3", "checkpoint.keep=1", "schedule.mode=overlap", "sync.method=disk", "lora.rank=8",
    )  # fmt: skip

    def last_step():
        assert driver.poll() is None, driver.communicate()
        return read_metrics(run)[-1]["step"] if (run / "metrics.jsonl").exists() else -1

    def kill_one(name):
        [p for p in psutil.Process(driver.pid).children(recursive=True) if name in p.name()][-1].kill()

    with ending(started_rl(run, tiny_model, *settings)) as driver:
        wait_for(lambda: last_step() >= 2, "two steps are done")
        assert not (strangers := open_to_the_network(driver.pid)), strangers
        assert (Path.home() / ".ray" / "auth_token").stat().st_mode & 0o077 == 0
        kill_one("EngineCore")
        reached = last_step()
        wait_for(lambda: last_step() >= reached + 3 and checkpoints(run), "steps are done with the new engine")
        reached = last_step()
        kill_one("TrainerActor")
        wait_for(lambda: last_step() >= reached + 2, "steps are done after the job began again")
        everybody = psutil.Process(driver.pid).children(recursive=True)
        names = " ".join(p.name() for p in everybody)
        for one in ("raylet", "EngineCore", "TrainerActor", "RolloutActor"):
            assert one in names
        next(p for p in everybody if "EngineCore" in p.name()).suspend()
        driver.kill()
        said = driver.communicate()[0]
    assert "It is started again" in said and "The job begins again from" in said, said
    wait_for(lambda: not any(is_alive(p.pid) for p in everybody), "everybody has ended")
    wait_for(lambda: not marked_processes(run), "all that had the run's environment have ended")
    step = read_marker(checkpoints(run)[-1])["step"]  # of two, when it was killed before the older one made room
    lines = []
    with ending(started_rl(run, tiny_model, *settings, flags=("--resume",))) as process:
        for line in process.stdout:
            lines.append(line)
            if line.startswith(f"step {step + 2}/"):
                break
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the foreground group
        printed, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130, printed + errors
    assert f"goes on after step {step}" in "".join(lines)
    assert "interrupted" in errors
    assert "Traceback" not in printed + errors
    assert (run / "report.html").exists()
    assert not list((run / "sync").glob("*"))
    wait_for(lambda: not marked_processes(run), "no process is left")
    check_whole_run_of_adapters(run, tiny_model)


def check_whole_run_of_adapters(run, model):
    """No step is missing or there twice, nothing is older than it may be, and only adapters were sent and kept."""
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    groups = [{sample["group"] for sample in read_samples(run, step)} for step in range(1, len(rows))]
    assert all(len(names) == 16 for names in groups) and len(set().union(*groups)) == 16 * len(groups)
    assert max(row.get("train/staleness_max", 0) for row in rows[1:]) <= 1
    assert max(row.get("sync/probe_gap_max", 0) for row in rows) < 1e-2, "engines held the adapter that was trained"
    newest = checkpoints(run)[-1]
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in newest.iterdir()}
    assert not (newest / "model.safetensors").exists(), "a checkpoint holds the adapter alone"
    sent = [row["sync/bytes"] for row in rows[1:] if row.get("sync/bytes")]
    assert 0 < max(sent) < (model / "model.safetensors").stat().st_size / 3, "only the adapter is sent"
