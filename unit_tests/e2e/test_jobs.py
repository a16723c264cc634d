"""Whole jobs on the shared stack: learning, what is not finite, refilled filters, a user's own files."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from orchestration.metrics.rollouts import RewardFailures
from orchestration.rl.loop import drive
from orchestration.run.directory import checkpoints
from orchestration.run.nonfinite import NonFiniteError
from orchestration.run.samples import read_samples, samples_path
from unit_tests.e2e.shared_stack import STEPS, UPDATES, SharedStack
from unit_tests.test_add_a_method import PAGE, code_blocks

pytestmark = pytest.mark.e2e


def mean_reward(path: Path, step: int) -> float:
    rewards = [sample["reward"] for sample in read_samples(path, step)]
    return sum(rewards) / len(rewards)


def test_reward_and_heldout_accuracy_rise(stack: SharedStack) -> None:
    """Alone catches a whole loop that does not learn: half a million parameters are to sort, on two ranks under
    ZeRO-2."""
    done = stack.run(
        {
            "rollout": {"prompts_per_step": 32, "responses_per_prompt": 16},
            "train": {"steps": 15, "updates_per_step": 1, "zero_stage": 2, "max_tokens_per_micro_batch": 150},
            "eval": {"every": 5, "max_prompts": 100},
            "checkpoint": {"every": 5},
        }
    )
    before, after = mean_reward(done.path, 1), sum(mean_reward(done.path, step) for step in (13, 14, 15)) / 3
    assert after > before + 0.3, [row.get("reward/mean") for row in done.rows]
    accuracy = {row["step"]: row["eval/greedy_accuracy"] for row in done.rows if "eval/greedy_accuracy" in row}
    assert sorted(accuracy) == [0, 5, 10, 15]
    assert accuracy[15] > accuracy[0] + 0.2, accuracy
    assert max(row["sync/probe_gap_max"] for row in done.rows) < 1e-3
    assert max(row["train/micro_batches"] for row in done.rows[1:]) > 1
    for row in done.rows[1:]:
        assert row["reward/mean"] == pytest.approx(mean_reward(done.path, row["step"]))
        assert row["train/logprob_gap_max"] < 1e-3
        assert row["method/ratio"] == 1, "one update a step: pi_old is pi"
    assert [path.name for path in checkpoints(done.path)] == ["step_000010", "step_000015"]
    assert "step 15/15" in done.console


def test_a_job_does_not_feel_the_one_before(stack: SharedStack) -> None:
    """Alone catches state of a job that is left in actors: the same job twice, with another between, must be the
    same."""
    job = {"train": {"steps": 1}}
    first = stack.run(job)
    stack.run({"algorithm": {"name": "ppo"}, "train": {"steps": 1, "learning_rate": 0.01}})
    again = stack.run(job)
    assert first.weights[0] == again.weights[0] != first.weights[1]
    texts = [[sample["response"] for sample in read_samples(done.path, 1)] for done in (first, again)]
    assert texts[0] == texts[1]
    for name in ("train/gradient_norm", "train/action_tokens", "train/staleness_max", "sync/probe_gap_max"):
        assert first.rows[1][name] == pytest.approx(again.rows[1][name], rel=1e-3, abs=1e-4)


def reward_of(user_folder: Path, name: str, body: str) -> dict:
    """The reward block of a user's own function."""
    (user_folder / f"{name}.py").write_text(f"def score(trajectory):\n{body}")
    return {"parts": [{"function": "exact_match"}, {"function": f"{name}:score", "weight": 0.1}]}


NAN_IN_CALL = """\
import torch
from algs.advantages import group_mean
from algs.records import Groups

calls = []

def advantage(groups: Groups):
    calls.extend(groups.rewards[31:32])  # not when it is tried on made-up groups
    return group_mean(groups) * torch.where(torch.tensor(len(calls) in {calls}), torch.nan, 1.0)
"""


def nan_advantage(user_folder: Path, name: str, calls: str) -> dict:
    """The objective block of an own advantage that is NaN in these of its calls."""
    (user_folder / f"{name}.py").write_text(NAN_IN_CALL.replace("{calls}", calls))
    return {"advantage": {"function": f"{name}:advantage"}}


def test_an_advantage_that_is_nan_once_costs_one_step(stack: SharedStack, user_folder: Path) -> None:
    """Alone catches a rank that takes a step which another skipped, and a step that is not kept for the step
    debugger."""
    objective = nan_advantage(user_folder, "nan_once", "(2,)")
    done = stack.run({"objective": objective, "train": {"updates_per_step": 1}})
    assert [row["step"] for row in done.rows] == [0, 1, 2, 3]
    assert [row["train/skipped_updates"] for row in done.rows[1:]] == [0, 1, 0]
    moved = [after != before for before, after in zip(done.weights, done.weights[1:], strict=False)]
    assert moved == [True, False, True]
    assert [path.name for path in (done.path / "captured_steps").iterdir()] == ["step_000002_update_0"]
    kept = {path.name for path in (done.path / "captured_steps" / "step_000002_update_0").iterdir()}
    assert {"rank_0.pkl", "rank_1.pkl", "policy"} <= kept
    assert {s["advantage"] for s in read_samples(done.path, 2)} == {"NaN"}


def test_an_advantage_that_is_always_nan_stops_the_run(stack: SharedStack, user_folder: Path) -> None:
    """Alone catches a run that goes on for ever, or a checkpoint of spoilt weights."""
    job = {
        "objective": nan_advantage(user_folder, "nan_always", "range(99)"),
        "train": {"steps": 10, "max_skipped_in_a_row": 4},
    }
    done = stack.run(job, raises=NonFiniteError)
    (checkpoint,) = checkpoints(done.path)
    assert str(checkpoint) in str(done.error) and "orchestration.step_debugger" in str(done.error)
    assert checkpoint.name == "step_000002"  # two updates a step
    assert len(read_samples(done.path, 2)) == 32
    assert len(list((done.path / "captured_steps").iterdir())) == done.config.capture.keep
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kept, given = (AutoModelForCausalLM.from_pretrained(path) for path in (checkpoint, done.config.model.path))
    assert all((a == b).all() for a, b in zip(kept.parameters(), given.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(checkpoint).chat_template


def test_rewards_that_fail_stop_the_run(stack: SharedStack, user_folder: Path) -> None:
    """Alone catches failures that become zeros, and samples that are lost with the run."""
    reward = reward_of(user_folder, "broken", '    raise RuntimeError("the judge is out")\n')
    done = stack.run({"reward": reward}, raises=RewardFailures)
    assert "the judge is out" in str(done.error)
    assert all(sample["reward"] is None for sample in read_samples(done.path, 1))
    assert [row["step"] for row in done.rows] == [0]


def test_a_disk_that_takes_no_samples_hides_no_error(stack: SharedStack, user_folder: Path) -> None:
    """Alone catches an error of the disk that stands in for the first one."""
    reward = reward_of(user_folder, "broken_too", '    raise RuntimeError("the judge is out")\n')
    with stack.job({"reward": reward}) as job:
        samples_path(job.run.path, 1).mkdir()  # nothing can be written under that name
        with pytest.raises(RewardFailures, match="the judge is out") as caught:
            drive(job, lambda path: path)
    assert "what was to be kept could not be written" in caught.value.__notes__[0]
    with stack.job({}) as job:
        samples_path(job.run.path, 1).mkdir()
        with pytest.raises(IsADirectoryError):
            drive(job, lambda path: path)


def test_groups_without_signal_are_asked_for_anew(stack: SharedStack) -> None:
    """Alone catches a batch that dynamic sampling does not fill, or fills beyond its cap."""
    filters = [{"function": "zero_variance", "refill": True}]
    done = stack.run(
        {
            "algorithm": {"name": "dapo"},
            "rollout": {"filters": filters, "max_refill_rounds": 2, "responses_per_prompt": 2},
        }
    )
    asked = done.config.rollout.prompts_per_step
    for row in done.rows[1:]:
        groups: dict[str, list[dict]] = {}
        for sample in read_samples(done.path, row["step"]):
            groups.setdefault(sample["group"], []).append(sample)
        flat = [g for g in groups.values() if len({s["reward"] for s in g}) == 1]
        assert row["rollout/filtered_groups"] == len(flat) == row["rollout/zero_variance_groups"]
        assert row["rollout/refilled_groups"] == len(groups) - asked > 0
        assert row["rollout/unfilled_groups"] == asked - (len(groups) - len(flat))
        assert row["rollout/refilled_groups"] <= 2 * asked
        assert row["rollout/filtered/zero_variance"] == 2 * len(flat) == row["rollout/dropped_responses"]
        assert row["train/trajectories"] == 2 * (len(groups) - len(flat))
        assert all((s["dropped_by"] == "zero_variance") == (g in flat) for g in groups.values() for s in g)


def test_a_users_own_files_run(stack: SharedStack, user_folder: Path) -> None:
    """Alone catches files of docs/guide/ADD_A_METHOD.md that do not work in a real job."""
    files = code_blocks(PAGE)
    (user_folder / "my_lab").mkdir()
    for name in files:
        (user_folder / name).write_text(files[name])
    job = yaml.safe_load(files["my_lab/mine.yaml"])
    assert job.pop("extends") == "../configs/grpo_tiny.yaml", "which the shared job is, made smaller"
    done = stack.run(job)
    rows = done.rows[1:]
    assert len(rows) == STEPS
    assert all(row["method/weight"] != 1 for row in rows if row["train/empty_updates"] < UPDATES)
    assert done.weights[0] != done.weights[-1]
    for name in ("objective/correction_weight", "reward/short", "rollout/filtered/not_too_easy"):
        assert all(name in row for row in rows)
