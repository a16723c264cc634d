"""docs/guide/ADD_A_METHOD.md does what it says: its files are written to a folder, loaded by the config, built and run."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from algs.introspection.method_facts import made_up_groups, made_up_tokens
from configs.blocks.rl import RLConfig
from configs.reading.load import load, method_for
from eval import explain
from plugins.kinds import find
from records.rollout import Group, Prompt, Trajectory
from rollouts.filter import apply_filters, filters_of

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "guide" / "ADD_A_METHOD.md"


def code_blocks(page: Path) -> dict[str, str]:
    """The page's code blocks by the file that the first line of each names, as in `# my_lab/my_loss.py`."""
    found = re.findall(r"^```\w+\n# (\S+)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return dict(found)


def write_page(page: Path, folder: Path) -> None:
    """Make `folder` what a reader of the page has: the files it shows, beside our configs/."""
    for name, text in code_blocks(page).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "configs").symlink_to(ROOT / "configs")


@pytest.fixture
def lab(tmp_path, monkeypatch) -> Path:
    write_page(PAGE, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # load() adds the folder
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "my_lab"]:
        del sys.modules[name]


@pytest.fixture
def config(lab) -> RLConfig:
    return load("my_lab/mine.yaml", RLConfig)


def test_the_page_is_short() -> None:
    """A walk-through that takes longer is not a walk-through."""
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) < 60
    assert list(code_blocks(PAGE)) == ["my_lab/my_loss.py", "my_lab/my_parts.py", "my_lab/mine.yaml"]


def test_method_has_its_parameters_and_gradient(config) -> None:
    """weight = r^power, without gradient through it; values outside the bounds are refused."""
    method = method_for(config)
    assert method.params.power == 0.7
    tokens = made_up_tokens()
    tokens = dataclasses.replace(tokens, logprobs=tokens.logprobs.detach().requires_grad_())
    answer = method.loss(tokens)
    (slope,) = torch.autograd.grad(answer.loss.sum(), tokens.logprobs)
    ratio = np.exp(tokens.logprobs.detach().double().numpy() - tokens.old_logprobs.double().numpy())
    np.testing.assert_allclose(slope, -(ratio**0.7) * tokens.advantages.numpy(), rtol=1e-4)
    assert answer.metrics["weight"].shape == answer.loss.shape
    with pytest.raises(ValueError, match="power"):
        load("my_lab/mine.yaml", RLConfig, overrides=["algorithm.power=2"])
    with pytest.raises(ValueError, match="did you mean"):
        load("my_lab/mine.yaml", RLConfig, overrides=["algorithm.powr=1"])


def test_own_advantage_takes_the_methods_place(config) -> None:
    """objective.advantage is clamped at params.largest; without it the method's own is used."""
    groups = made_up_groups((4, 3), with_critic=False)
    means = [float(groups.rewards[groups.group == g].double().mean()) for g in (0, 1)]
    centred = [float(r) - means[int(g)] for r, g in zip(groups.rewards, groups.group, strict=True)]
    assert max(abs(a) for a in centred) > 0.3, "the bound must bind"
    tight = load("my_lab/mine.yaml", RLConfig, overrides=["objective.advantage.params.largest=0.2"])
    found = tight.objective.advantage_function(method_for(tight))(groups)
    np.testing.assert_allclose(found, np.clip(centred, -0.2, 0.2), atol=1e-6)
    own = load("my_lab/mine.yaml", RLConfig, overrides=["objective.advantage=null"])
    np.testing.assert_allclose(own.objective.advantage_function(method_for(own))(groups), centred, atol=1e-6)


def test_own_correction_weighs_and_rejects(config) -> None:
    """min(rho, 2) on each token, tokens below 0.01 left out."""
    (correction,) = config.objective.correction_functions()
    rho = torch.tensor([0.005, 0.5, 1.0, 5.0])
    tokens = made_up_tokens()
    tokens = dataclasses.replace(tokens, behavior_logprobs=tokens.old_logprobs - rho.log().repeat(4))
    found = correction(tokens)
    np.testing.assert_allclose(found.weights[:4], [0.005, 0.5, 1, 2], rtol=1e-5)
    assert found.keep[:4].tolist() == [False, True, True, True]


def said(reward: float | None, tokens: int = 3) -> Trajectory:
    none, ids = np.zeros(0, dtype=np.int32), np.zeros(tokens, dtype=np.int32)
    logprobs, prompt = np.zeros(tokens, dtype=np.float32), Prompt("p", [], answer="1")
    return Trajectory(prompt, "g", 0, none, ids, logprobs, ids, np.ones(tokens, bool), ids, reward=reward)


def group_of(*rewards: float) -> Group:
    trajectories = [said(reward) for reward in rewards]
    return Group("g", trajectories[0].prompt, trajectories)


def test_own_filter_leaves_easy_groups_out(config) -> None:
    """A group with a mean reward above 0.9 is left out, and its place is asked for again."""
    (easy,) = filters_of(config.rollout.filters)
    assert easy.refill
    by = apply_filters([easy], [group_of(1.0, 1.0), group_of(1.0, 0.0)])
    assert [None if found is None else found.name for found in by] == ["not_too_easy", None]


def test_own_reward_pays(config) -> None:
    """short pays 1 up to 5 tokens, then less."""
    part = config.reward.parts[1]
    assert (part.function, part.weight) == ("my_lab.my_parts:short", 0.1)
    assert [find("reward", part.function)(said(None, n)) for n in (3, 5, 10)] == [1.0, 1.0, 0.5]


def test_explain_shows_it(lab, monkeypatch, capsys) -> None:
    """python -m eval.explain my_lab.my_loss:Mine: formula, parameter, advantage, and the weight 10^0.5 at r = 10."""
    monkeypatch.syspath_prepend(lab)  # python -m puts the folder it runs in there
    assert explain.main(["my_lab.my_loss:Mine"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "Tempered REINFORCE",
        "-sg[(pi / pi_old)^power] A log pi",
        "power = 0.5",
        "group_mean",
        "method/weight",
    ):
        assert text in shown
    assert re.search(r"^ *10 +3\.162 +-3\.162$", shown, re.MULTILINE)
