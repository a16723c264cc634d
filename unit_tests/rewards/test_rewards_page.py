"""docs/guide/REWARDS.md: every reward that ships has a section, and its examples pass the checks before a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from configs.blocks.rl import Reward
from plugins.kinds import listed
from plugins.marks import is_of_group
from plugins.parameters import check
from records.rollout import Group, Prompt, Trajectory
from rewards.sandbox import run as sandbox

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "REWARDS.md").read_text()
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_every_reward_has_its_section_and_its_row() -> None:
    sections = [name for line in re.findall(r"^### (.*)$", PAGE, re.MULTILINE) for name in line.split(", ")]
    assert sorted(sections) == list(listed("reward"))
    rows = dict(re.findall(r"^\| \[`(\w+)`\]\(#([\w-]+)\) \|", PAGE, re.MULTILINE))
    assert sorted(rows) == list(listed("reward"))
    anchors = {re.sub(r"[^\w -]", "", line).replace(" ", "-") for line in re.findall(r"^### (.*)$", PAGE, re.MULTILINE)}
    assert set(rows.values()) <= anchors


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_pass_the_checks(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_API_KEY", "x")
    for part in Reward.model_validate(yaml.safe_load(example)["reward"]).parts:
        if ":" in part.function:  # the reader's own
            continue
        params: dict[str, Any] = dict(part.params)
        if params.get("isolation") == "namespaces":
            try:
                sandbox.check("namespaces")
            except ValueError as error:
                pytest.skip(str(error))
        check("reward", part.function, params)


def test_examples_name_every_reward() -> None:
    named = {part["function"] for text in EXAMPLES for part in yaml.safe_load(text)["reward"]["parts"]}
    assert set(listed("reward")) - named == {"length", "repetition"}  # shown in a table


def test_the_group_reward_in_the_page_pays_as_it_says() -> None:
    (code,) = (c for c in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) if "@of_group" in c)
    page: dict[str, Any] = {}
    exec(code, page)
    none, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
    said = [
        Trajectory(Prompt("p", []), "g", 0, none, none, floats, none, np.zeros(0, bool), none, response=text)
        for text in ("a", " b", "a ")
    ]
    assert is_of_group(page["nobody_else_said_it"])
    assert page["nobody_else_said_it"](Group("g", said[0].prompt, said)) == [0.0, 1.0, 0.0]
