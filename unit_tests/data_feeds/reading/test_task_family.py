"""A task is found in its part of reasoning_gym, and all of reasoning_gym can be imported afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def said(code: str) -> list[str]:
    """What the code prints in a process of its own: what is imported stays imported."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_one_family_is_enough_and_the_rest_can_follow() -> None:
    code = """
import sys
from data_feeds.reading.task_family import task_classes
for task in ("chain_sum", "products"):
    assert task in task_classes(task)
print("matplotlib" in sys.modules, "sympy" in sys.modules, len(task_classes("chain_sum")) < 30)
from reasoning_gym.factory import create_dataset
rows = [create_dataset("chain_sum", size=3, seed=5)[i]["question"] for i in range(3)]
print("game_of_life" in task_classes("game_of_life"), "no_such_task" in task_classes("no_such_task"))
import reasoning_gym
print(len(task_classes("chain_sum")) > 90, callable(reasoning_gym.create_dataset))
print(rows == [reasoning_gym.create_dataset("chain_sum", size=3, seed=5)[i]["question"] for i in range(3)])
"""
    assert said(code) == ["False", "False", "True", "True", "False", "True", "True", "True"]


def test_a_name_that_no_task_has_lists_all_there_are() -> None:
    code = """
from data_feeds.reading.task_family import task_classes
print(len(task_classes("chain_smu")) > 90)
"""
    assert said(code) == ["True"]
