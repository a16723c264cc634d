"""The Python and YAML in the pages is run, so that it cannot rot."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from algs import grpo
from algs.introspection.method_facts import made_up_tokens
from algs.records import Groups, PolicyTokens
from configs.blocks.rl import Data, Reward, Rollout
from plugins.parameters import values_for
from records.rollout import Group, Prompt, Trajectory

ROOT = Path(__file__).parent.parent


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def module_of(tmp_path, monkeypatch):
    """Saves a page's n-th Python block as a module and imports it, as a reader would."""

    def load(page: str, number: int) -> ModuleType:
        name = f"page_{Path(page).stem}_{number}"
        path = tmp_path / f"{name}.py"
        path.write_text(blocks(page, "python")[number])
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


def test_method_in_the_readme_is_the_one_that_ships() -> None:
    """The README leaves imports and the docstring out; its class has the parameters and the loss of algs/grpo.py."""
    (source,) = blocks("README.md", "python")
    shown: dict[str, Any] = dict(vars(grpo))
    exec(source, shown)
    ours, theirs = grpo.GRPO(grpo.GRPO.Params()), shown["GRPO"](shown["GRPO"].Params())
    assert dataclasses.asdict(ours.params) == dataclasses.asdict(theirs.params)
    tokens = made_up_tokens()
    assert torch.equal(ours.loss(tokens).loss, theirs.loss(tokens).loss)


def test_method_in_contributing_trains(module_of) -> None:
    method_class = module_of("CONTRIBUTING.md", 0).GroupReinforce
    method = method_class(method_class.Params(scale=2.0))
    group = torch.tensor([0, 0, 1, 1, 1])
    found = method.advantages(Groups(torch.tensor([1.0, 0, 3, 0, 0]), group, torch.ones(5, dtype=torch.int64)))
    assert found.tolist() == [0.5, -0.5, 2.0, -1.0, -1.0]
    logprobs = torch.full((5,), -1.0, requires_grad=True)
    zeros = torch.zeros(5)
    tokens = PolicyTokens(logprobs, zeros, zeros, found, zeros, torch.arange(5), group, zeros.long())
    method.loss(tokens).loss.sum().backward()
    assert torch.equal(logprobs.grad, -2.0 * found)


def test_reward_in_the_page_pays_as_it_says(module_of) -> None:
    reward = module_of("docs/guide/REWARDS.md", 0).short_and_right

    def said(response: str, tokens: int) -> Trajectory:
        none, ids = np.zeros(0, dtype=np.int32), np.zeros(tokens, dtype=np.int32)
        floats = np.zeros(tokens, dtype=np.float32)
        return Trajectory(
            Prompt("p", [], answer="16"), "g", 0, none, ids, floats, ids, np.ones(tokens, bool), ids, response=response
        )

    assert [reward(said(" 16 ", 4)), reward(said("16", 40)), reward(said("17", 4))] == [1.0, 0.5, 0.0]


def test_trying_out_a_reward_by_hand(module_of) -> None:
    module_of("docs/guide/REWARDS.md", 2)  # it asserts


def test_a_reward_with_a_rule_on_its_parameters(module_of) -> None:
    digits = module_of("docs/guide/REWARDS.md", 1).digits
    values_for(digits, {"low": 2})
    with pytest.raises(ValueError, match=r"params.low: 10 is above high 9"):
        values_for(digits, {"low": 10})


def test_filter_in_the_page(module_of) -> None:
    long_enough = module_of("docs/guide/FILTERS.md", 0).long_enough
    none = np.zeros(0, np.int32)
    said = [
        Trajectory(Prompt("p", []), "g", 0, none, ids, np.zeros(n, np.float32), ids, np.ones(n, bool), ids)
        for n in (1, 2)
        for ids in [np.zeros(n, np.int32)]
    ]
    assert long_enough(Group("g", said[0].prompt, said)) == [False, True]


def test_yaml_in_the_pages_is_valid_configuration() -> None:
    for reward in blocks("docs/guide/REWARDS.md", "yaml"):
        assert Reward.model_validate(yaml.safe_load(reward)["reward"]).parts
    for filters in blocks("docs/guide/FILTERS.md", "yaml"):
        assert Rollout.model_validate(yaml.safe_load(filters)["rollout"]).filters
    (data,) = blocks("docs/guide/DATA.md", "yaml")
    assert len(Data.model_validate(yaml.safe_load(data)["data"]).sources) == 2


def test_every_page_is_reached_from_the_readme() -> None:
    """Following links from the README, a reader comes to every page under docs/."""
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        links = re.findall(r"\]\(([^)\s#]+\.md)", page.read_text(encoding="utf-8"))
        targets = {(page.parent / link).resolve() for link in links if "://" not in link}
        waiting += [target for target in targets - reached - set(waiting) if target.is_file()]
    assert set((ROOT / "docs").rglob("*.md")) - reached == set()


def test_commands_on_the_pages_name_what_exists() -> None:
    """Every `python -m module` of ours, and every configuration file that a command or a sentence names."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    ours = "benchmarks|configs|data_feeds|data_prep|eval|orchestration"
    missing = []
    for module in sorted(set(re.findall(rf"python -m ((?:{ours})[\w.]*\w)", text))):
        path = ROOT / module.replace(".", "/")
        if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
            missing.append(module)
    missing += [name for name in set(re.findall(r"\bconfigs/\w+\.yaml", text)) if not (ROOT / name).is_file()]
    assert missing == []
