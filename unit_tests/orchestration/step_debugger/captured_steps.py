"""What test_step_debugger.py captures, changes and runs: trajectories, changed copies of captured steps, commands."""

import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file

from data_feeds.packing import pack
from data_feeds.responses import Responses
from records.rollout import Prompt, Trajectory
from unit_tests.orchestration.ranks.step_debugger_rank import CASES, STEP
from unit_tests.tiny_model import WORDS
from unit_tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[3]
LOSS_WEIGHT = 1 / 40
CAP = 1.05


def trajectories(seed: int) -> list[Trajectory]:
    rng = np.random.default_rng(seed)
    made = []
    for group in range(3):
        prompt = rng.integers(0, len(WORDS), 4).astype(np.int32)
        for sample in range(3):
            n = int(rng.integers(3, 9))
            made.append(
                Trajectory(
                    Prompt(f"p{group}", []), f"g{group}", sample, prompt,
                    token_ids=rng.integers(2, len(WORDS), n).astype(np.int32),
                    behavior_logprobs=np.zeros(n, np.float32), versions=np.arange(n, dtype=np.int32) % 2,
                    is_action=np.ones(n, np.bool_), turn=np.zeros(n, np.int32), reward=float(rng.integers(0, 2)),
                )
            )  # fmt: skip
    return made


def members(update: int, ranks: int) -> list[Trajectory]:
    """Update 0 of two ranks has a single response, so that the second rank gets a dummy."""
    return trajectories(update)[: 1 if (update, ranks) == (0, 2) else 9]


def packed(ranks: int) -> list:
    updates = []
    for update in range(2):
        made = members(update, ranks)
        advantages = np.random.default_rng(update + 5).normal(size=len(made)).astype(np.float32)
        weights, groups = np.full(len(made), LOSS_WEIGHT, np.float32), np.repeat(np.arange(3), 3)[: len(made)]
        responses = Responses(made)
        columns = responses.columns(2, advantages=advantages)
        updates.append(pack(responses, groups, weights, columns, 24, ranks, True))
    assert len(updates[1][0]) > 1, "several micro-batches per rank"
    assert updates[0][-1][-1].is_dummy == (ranks == 2)
    return updates


def step_of(folder: Path, case: str, update: int = 1) -> Path:
    return folder / case / "captured_steps" / f"step_{STEP:06d}_update_{update}"


def changed_copy(folder: Path, case: str, name: str, change) -> Path:
    """A captured step with one of its micro-batches changed by `change(batch)`."""
    copy = folder / "changed" / name
    shutil.copytree(step_of(folder, case), copy)
    step, live, reason = pickle.loads((copy / "rank_0.pkl").read_bytes())
    step.batches[0] = change(step.batches[0])
    (copy / "rank_0.pkl").write_bytes(pickle.dumps((step, live, reason)))
    return copy


def changed_weights(folder: Path, name: str, value: float) -> Path:
    copy = folder / "changed" / name
    shutil.copytree(step_of(folder, "grpo"), copy)
    weights = load_file(copy / "policy" / "model.safetensors")
    weights["model.norm.weight"][3] = value
    save_file(weights, copy / "policy" / "model.safetensors", metadata={"format": "pt"})
    return copy


def with_advantage(value: float, factor: float = 1.0):
    def change(batch):
        advantages, weights = batch.columns["advantages"].copy(), batch.loss_weights * np.float32(factor)
        advantages[2] = value
        return replace(batch.with_columns({"advantages": advantages}), loss_weights=weights)

    return change


def with_reward(value: float):
    def change(batch):
        rewards, advantages = batch.rewards.copy(), batch.columns["advantages"].copy()
        rewards[1], advantages[batch.sequence == 1] = value, np.nan
        return replace(batch.with_columns({"advantages": advantages}), rewards=rewards)

    return change


def without_rewards(batch):
    older = replace(batch)
    vars(older).pop("rewards")
    return older


def commands(folder: Path) -> dict[str, list]:
    """By a name of this test's own: the arguments of a command."""
    nudged = changed_copy(folder, "grpo", "nudged", lambda b: with_advantage(b.columns["advantages"][2] * 1.0001)(b))
    found = {f"{case} {update}": [step_of(folder, case, update)] for case in CASES for update in (0, 1)}
    found |= {
        "page": [step_of(folder, "grpo"), "--algorithm", "cispo", "--set", f"ratio_cap={CAP}", "--html", folder / "step.html"],
        "nonfinite page": [step_of(folder, "nonfinite"), "--html", folder / "nonfinite.html"],
        "own": [step_of(folder, "grpo"), "--algorithm", "unit_tests.orchestration.ranks.poisonable:Poisonable"],
        "p3o instead": [step_of(folder, "grpo"), "--algorithm", "p3o"],
        "aipo instead": [step_of(folder, "corrected"), "--algorithm", "aipo"],
        "ppo instead": [step_of(folder, "grpo"), "--algorithm", "ppo"],
        "grpo instead": [step_of(folder, "ppo"), "--algorithm", "grpo"],
        "grpo of adapters": [step_of(folder, "lora"), "--algorithm", "grpo"],
        "sorted": [step_of(folder, "grpo"), "--sort", "ratio", "--ascending", "--top", "3", "--columns", "position,ratio"],
        "one response": [step_of(folder, "grpo"), "--trajectory", "4", "--columns", "trajectory", "--top", "99"],
        "breakpoint": [step_of(folder, "grpo"), "--breakpoint"],
        "nudged": [nudged],
        "weight": [changed_weights(folder, "weight", 0.9)],
        "nonfinite weight": [changed_weights(folder, "nonfinite weight", float("nan"))],
        "reward": [changed_copy(folder, "grpo", "reward", with_reward(np.nan))],
        "gradient": [changed_copy(folder, "grpo", "gradient", with_advantage(3e38, 20))],
        "norm": [changed_copy(folder, "grpo", "norm", with_advantage(1e30))],
        "list": [folder / "grpo"],
        "nothing": [folder / "absent"],
        "half": [folder / "changed" / "half"],
        "older": [changed_copy(folder, "grpo", "older", without_rewards)],
        "no column": [step_of(folder, "grpo"), "--sort", "shares"],
        "no trajectory": [step_of(folder, "grpo"), "--trajectory", "9"],
        "lone set": [step_of(folder, "grpo"), "--set", "ratio_cap=2"],
        "no method": [step_of(folder, "grpo"), "--algorithm", "cipso"],
    }  # fmt: skip
    shutil.copytree(step_of(folder, "two_ranks"), folder / "changed" / "half")
    (folder / "changed" / "half" / "rank_1.pkl").unlink()
    return {name: [str(argument) for argument in arguments] for name, arguments in found.items()}


def run_commands(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "unit_tests.orchestration.ranks.step_debugger_rank", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
