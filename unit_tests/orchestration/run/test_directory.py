import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestration.run.atomic_files import afterwards
from orchestration.run.checksums import read_marker
from orchestration.run.directory import RunDirectory, check_free, checkpoints, read_metrics
from orchestration.run.provenance import describe_provenance, git_state
from orchestration.run.samples import prompt_text, read_samples, sample_steps, version_runs
from records.rollout import Prompt, Trajectory

ROOT = Path(__file__).resolve().parents[3]


def make_trajectory(response: str = "4", reward: float | None = 1.0, answer: object = "4") -> Trajectory:
    prompt = Prompt("sum/1", [{"role": "user", "content": "2 + 2 = ?"}], answer=answer, source="sum")
    return Trajectory(
        prompt=prompt,
        group_id="1/0",
        sample=0,
        prompt_ids=np.arange(3, dtype=np.int32),
        token_ids=np.arange(2, dtype=np.int32),
        behavior_logprobs=np.zeros(2, dtype=np.float32),
        versions=np.array([3, 4], dtype=np.int32),
        is_action=np.ones(2, dtype=np.bool_),
        turn=np.zeros(2, dtype=np.int32),
        response=response,
        finish_reason="stop",
        reward=reward,
        advantage=None if reward is None else 0.5,
        reward_parts={} if reward is None else {"last_number": reward},
        reward_error=None if reward is not None else "ValueError: no",
    )


def test_samples_say_what_a_filter_left_out(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "x: 1\n")
    kept, dropped, failed = make_trajectory(), make_trajectory(), make_trajectory(reward=None)
    dropped.dropped_by, dropped.in_baseline = "overlong", False
    run.write_samples(1, [kept, dropped, failed])
    said = [(record["dropped_by"], record["in_baseline"]) for record in read_samples(run.path, 1)]
    assert said == [(None, True), ("overlong", False), (None, False)]


def test_create_writes_what_the_run_is_and_refuses_a_second_one(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "runs" / "a", "train: {steps: 3}\n", seeds={"run": 7})
    assert (run.path / "config.yaml").read_text() == "train: {steps: 3}\n"
    environment = json.loads((run.path / "environment.json").read_text())
    assert environment["seeds"] == {"run": 7} and environment["run_id"] == run.run_id
    assert environment["packages"]["torch"] and environment["cpus"] >= 1
    before = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match="already holds a run; choose another with --run-dir"):
        RunDirectory.create(run.path, "other: 1\n")
    assert {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == before


def test_a_folder_with_something_else_in_it_is_refused_and_an_empty_one_is_not(tmp_path: Path) -> None:
    check_free(tmp_path)
    check_free(tmp_path / "absent")
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="is not empty"):
        check_free(tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        check_free(tmp_path / "thesis.tex")


def test_metrics_keep_full_precision_and_show_what_is_not_finite(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a", "")
    run.write_metrics(0, {"eval/accuracy": 0.1 + 0.2})
    run.write_metrics(1, {"train/loss": math.nan, "train/gradient_norm": math.inf, "reward/mean": -math.inf})
    rows = read_metrics(run.path)
    assert rows[0] == {"step": 0, "eval/accuracy": 0.1 + 0.2}
    assert math.isnan(rows[1]["train/loss"])
    assert (rows[1]["train/gradient_norm"], rows[1]["reward/mean"]) == (math.inf, -math.inf)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for line in (run.path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    with pytest.raises(ValueError, match="no definition"):
        run.write_metrics(2, {"train/los": 1.0})


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a", "")
    run.write_metrics(1, {"reward/mean": 0.5})
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "reward/me')
    assert read_metrics(run.path) == [{"step": 1, "reward/mean": 0.5}]
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize(
    ("versions", "runs"), [([], []), ([3], [[3, 1]]), ([2, 2, 3, 3, 3, 5], [[2, 2], [3, 3], [5, 1]])]
)
def test_versions_are_kept_as_runs_of_tokens(versions: list[int], runs: list[list[int]]) -> None:
    assert version_runs(np.array(versions, dtype=np.int32)) == runs


def test_observed_tokens_are_of_no_version(tmp_path: Path) -> None:
    observed = dataclasses.replace(make_trajectory(), is_action=np.array([True, False]))
    RunDirectory.create(tmp_path / "a", "").write_samples(1, [observed])
    assert read_samples(tmp_path / "a", 1)[0]["versions"] == [[3, 1]]


def test_samples_come_back_as_written(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a", "")
    odd = "line\u2028separator \x00 </script> \udc80 é 数"
    run.write_samples(12, [make_trajectory(odd), make_trajectory(reward=None, answer=math.nan)])
    run.write_samples(0, [make_trajectory(answer=np.int64(4))], heldout=True)
    first, second = read_samples(run.path, 12)
    assert first["response"] == odd and first["advantage"] == 0.5 and first["versions"] == [[3, 1], [4, 1]]
    assert first["parts"] == {"last_number": 1.0} and first["prompt"] == "user:\n2 + 2 = ?"
    assert second["reward"] is None and second["error"] == "ValueError: no" and second["answer"] == "NaN"
    assert read_samples(run.path, 0, heldout=True)[0]["answer"] == "4"
    assert (sample_steps(run.path), sample_steps(run.path, heldout=True)) == ([12], [0])


def test_prompt_text_names_roles_and_images() -> None:
    content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    assert prompt_text(messages) == "system:\nBe brief.\n\nuser:\n[image]\nWhat is it?"


def test_a_checkpoint_that_failed_leaves_nothing(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a", "")

    def fail_half_way() -> None:
        with run.checkpoint(1) as folder:
            (folder / "model.safetensors").write_bytes(b"half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail_half_way()
    assert list((run.path / "checkpoints").iterdir()) == []
    with run.checkpoint(1) as folder:
        (folder / "model.safetensors").write_bytes(b"whole")
    assert [p.name for p in checkpoints(run.path)] == ["step_000001"]
    with pytest.raises(ValueError, match="exists"):
        with run.checkpoint(1):
            pass
    assert (run.path / "checkpoints/step_000001/model.safetensors").read_bytes() == b"whole"


WRITE_FOR_EVER = """
import os, sys
from pathlib import Path
from orchestration.run.directory import RunDirectory
run = RunDirectory(Path(sys.argv[1]), "id")
for step in range(1, 1000000):
    with run.checkpoint(step) as folder:
        for part in range(20):
            (folder / f"part_{part}").write_bytes(bytes([step % 256]) * 200_000)
            if step == 3 and part == 10:
                print("writing", flush=True)
    run.prune_checkpoints(2)
"""


@pytest.mark.parametrize("delay_seconds", [0.0, 0.013, 0.05, 0.11])
def test_kill_9_in_the_middle_leaves_only_whole_checkpoints(tmp_path: Path, delay_seconds: float) -> None:
    run = RunDirectory.create(tmp_path / "a", "")
    command = [sys.executable, "-c", WRITE_FOR_EVER, str(run.path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        time.sleep(delay_seconds)
        os.kill(writer.pid, signal.SIGKILL)
    found = checkpoints(run.path)
    assert found, "steps 1 and 2 were finished before the kill"
    for path in found:
        step = read_marker(path)["step"]
        assert path.name == f"step_{step:06d}"
        contents = [(path / f"part_{part}").read_bytes() for part in range(20)]
        assert contents == [bytes([step % 256]) * 200_000] * 20

    with RunDirectory(run.path, "id").checkpoint(900_000):  # the next one clears what the killed process left
        pass
    hidden = [p.name for p in (run.path / "checkpoints").iterdir() if p.name.startswith(".")]
    assert hidden == []


def test_pruning_removes_only_what_this_run_made(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a", "")
    folder = run.path / "checkpoints"
    (folder / "step_000000").mkdir()  # a user's own copy, without our marker
    (folder / "step_000000" / "weights").write_text("precious")
    with RunDirectory(run.path, "another run").checkpoint(1):
        pass
    for step in (2, 10, 999_999, 1_000_000):
        with run.checkpoint(step):
            pass
    removed = run.prune_checkpoints(keep=2)
    assert [p.name for p in removed] == ["step_000002", "step_000010"]
    left = sorted(p.name for p in folder.iterdir())
    assert left == ["step_000000", "step_000001", "step_1000000", "step_999999"]
    assert run.prune_checkpoints(keep=2) == []


def test_environment_says_when_there_is_no_git_checkout(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    environment = describe_provenance()
    assert environment["python"] == sys.version.split()[0]
    assert json.loads(json.dumps(environment)) == environment


def test_what_is_written_in_the_end_hides_no_error() -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match="what went wrong") as raised, afterwards(full):
        raise ValueError("what went wrong")
    assert raised.value.__notes__ == [
        "and what was to be kept could not be written: [Errno 28] No space left on device"
    ]
    with pytest.raises(OSError, match="No space left"), afterwards(full):
        pass


def test_what_is_to_be_written_in_the_end_is_written_once() -> None:
    written: list[str] = []
    with afterwards(lambda: written.append("good")):
        assert written == []
    with pytest.raises(KeyboardInterrupt), afterwards(lambda: written.append("interrupted")):
        raise KeyboardInterrupt
    assert written == ["good", "interrupted"]


def test_every_path_is_absolute_because_actors_have_other_current_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory.create("runs/a", "")
    for path in (run.path, run.log_path("engine_0"), run.partial_checkpoint(1), RunDirectory.opened("runs/a").path):
        assert path.is_absolute() and path.is_relative_to(tmp_path)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 9856 vs 9750"),
    ],
)
def test_a_full_disk_is_said_with_folder_and_size(tmp_path: Path, error: Exception) -> None:
    run = RunDirectory.create(tmp_path / "a", "")

    def fail(step: int) -> None:
        with run.checkpoint(step) as folder:
            (folder / "model.safetensors").write_bytes(bytes(3 * 2**20))
            raise error

    with pytest.raises(OSError, match=f"the disk of {run.path} is full: .* step 1 takes more than 3.0 MiB; make room"):
        fail(1)
    with run.checkpoint(1) as folder:
        (folder / "model.safetensors").write_bytes(bytes(5 * 2**20))
    with pytest.raises(OSError, match=r"step 2 takes about 5\.0 MiB"):
        fail(2)
    assert [p.name for p in (run.path / "checkpoints").iterdir()] == ["step_000001"]
