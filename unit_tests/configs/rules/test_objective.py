"""Methods and what stands around them: combinations that make no sense are refused, and those that do are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.blocks.rl import RLConfig
from configs.blocks.supervised import SLConfig
from configs.reading.load import ConfigError, load
from configs.rules.every_job import warnings_for


def job(*overrides: str) -> RLConfig:
    return load("configs/grpo.yaml", RLConfig, ["train.steps=50", *overrides])


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        job(*overrides)
    return str(caught.value)


def method(name: str) -> str:
    return f"algorithm={{name: {name}}}"


TIS = "objective.corrections=[token_truncate]"
ENGINE = "objective.old_logprobs=engine"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([TIS, ENGINE], "objective.corrections: with objective.old_logprobs engine pi_old is mu"),
        ([method("p3o"), TIS], "objective.corrections: the loss of 'p3o' already reads mu"),
        ([method("aipo"), TIS], "objective.corrections: the loss of 'aipo' already reads mu"),
        ([method("decoupled_ppo"), TIS], "objective.corrections: the loss of 'decoupled_ppo' already reads mu"),
        (
            ["objective.corrections=[token_truncate, veto, sequence_mask]"],
            "objective.corrections: token_truncate and sequence_mask each multiply by pi_old / mu",
        ),
        (
            ["objective.kl={coef: 0.1, estimator: k1}"],
            "objective.kl.estimator: k1 in the loss holds nothing back: its gradient is 0 in expectation",
        ),
        (
            [method("rloo"), "objective.kl={coef: 0.1, placement: reward, estimator: k3}"],
            "objective.kl.estimator: k3 in the reward does not pull towards the reference",
        ),
        (
            [method("rloo"), "objective.kl={coef: 0.1, placement: reward, estimator: k2}"],
            "objective.kl.estimator: k2 in the reward does not pull towards the reference",
        ),
        (
            [method("rloo"), "objective.kl={coef: 0.1, placement: reward, importance: true}"],
            "objective.kl.importance: belongs to a KL in the loss",
        ),
        (
            ["objective.kl={coef: 0.1, placement: reward}"],
            "objective.kl.placement: reward has no strength under 'grpo', which divides by the spread of the group",
        ),
        (
            [method("rloo"), "objective.advantage=group_zscore", "objective.kl={coef: 0.1, placement: reward}"],
            "objective.kl.placement: reward has no strength under the advantage 'group_zscore'",
        ),
        (
            ["objective.corrections=[veto, {function: token_mask, params: {low: 5.0, high: 0.5}}]"],
            "objective.corrections.1: token_mask leaves out even tokens on which trainer and engine agree",
        ),
        (["objective.rejected_tokens=leave"], "objective.rejected_tokens: there is no correction"),
        ([method("ppo"), "objective.advantage=rloo"], "objective.advantage: 'ppo' has a critic"),
        (["objective.advantage=gae"], "objective.advantage.function: advantage 'gae': there is no advantage of that name"),
        ([method("decoupled_ppo"), ENGINE], "objective.old_logprobs: 'decoupled_ppo' weighs by pi_old / mu, which is 1"),
        (["critic.kind=shared"], "critic: 'grpo' has no critic; remove this block"),
        (
            [method("ppo"), "critic={kind: shared, learning_rate: 1e-5}"],
            "critic.learning_rate: a shared critic is trained by the policy's optimizer",
        ),
        ([method("ppo"), "critic.warmup_steps=50"], "critic.warmup_steps: 50 must be below train.steps 50"),
        (["capture.steps=[1, 51]"], "capture.steps: 51 is not among the run's steps, 1 to 50"),
        (["capture.steps=[0]"], "capture.steps: 0 is not among the run's steps"),
        (
            ["rollout.responses_per_prompt=1"],
            "rollout.responses_per_prompt: 1 gives every response an advantage of 0 under 'grpo'",
        ),
        (
            [method("reinforce_plus_plus"), "rollout.responses_per_prompt=1", "objective.advantage=rloo"],
            "1 gives every response an advantage of 0 under the advantage 'rloo'",
        ),
        ([method("sft")], "algorithm.name: 'sft' defines no advantage, so it cannot learn from rewards; choose one of aipo"),
        ([method("sft"), "objective.advantage=rloo"], "algorithm.name: the loss of 'sft' does not depend on advantages"),
    ],
)  # fmt: skip
def test_refused(overrides: list[str], expected: str) -> None:
    text = refusal(*overrides)
    assert expected in text
    assert "problems" not in text, "one mistake, one problem"


@pytest.mark.parametrize(
    "overrides",
    [
        [TIS],
        [method("reinforce"), TIS],
        [method("p3o")],
        [method("p3o"), ENGINE],
        [method("decoupled_ppo")],
        ["objective.corrections=[token_mask, geometric_mask, veto]", "objective.rejected_tokens=leave"],
        ["objective.kl={coef: 0.1, estimator: k2}"],
        [method("rloo"), "objective.kl={coef: 0.1, placement: reward}"],
        [method("reinforce_plus_plus"), "objective.kl={coef: 0.1, estimator: k1, placement: reward}"],
        [method("dr_grpo"), "objective.kl={coef: 0.1, placement: reward}"],
        [method("aipo"), "train.updates_per_step=2"],
        [method("ppo"), "objective.kl={coef: 0.1, estimator: k1, placement: reward}"],
        [method("ppo"), "rollout.responses_per_prompt=1", "rollout.prompts_per_step=128"],
        [method("ppo"), "critic={kind: separate, learning_rate: 1e-5, warmup_steps: 49}"],
        [method("ppo"), "critic.kind=shared"],
        ["objective.advantage=rloo", "objective.entropy_coef=0.01"],
        ["rollout.responses_per_prompt=1", "objective.advantage=reinforce_plus_plus"],
        [method("reinforce_plus_plus"), "rollout.responses_per_prompt=1"],
        ["capture.steps=[1, 50]"],
        [ENGINE, "train.updates_per_step=2"],
        ["rollout.filters=[{function: zero_variance, refill: true}]"],
    ],
)
def test_what_makes_sense_loads_without_a_warning(overrides: list[str]) -> None:
    assert warnings_for(job(*overrides)) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["objective.kl.estimator=k2"], "objective.kl.estimator: has no effect while objective.kl.coef is 0"),
        (["objective.kl.importance=true"], "objective.kl.importance: has no effect while objective.kl.coef is 0"),
        (["objective.kl.placement=reward"], "objective.kl.placement: has no effect while objective.kl.coef is 0"),
        (
            ["rollout.filters=[{function: zero_variance, refill: true}]", "rollout.max_refill_rounds=0"],
            "rollout.max_refill_rounds: 0 asks for no further prompts",
        ),
        ([ENGINE], "objective.old_logprobs: with one update per step the ratio"),
        (
            [method("rloo"), "train.updates_per_step=2"],
            "train.updates_per_step: the loss of 'rloo' has no ratio, so every update after a step's first",
        ),
        ([method("rloo"), "train.passes_per_batch=2"], "train.passes_per_batch: the loss of 'rloo' has no ratio"),
        ([method("reinforce"), "train.updates_per_step=2", TIS], "train.updates_per_step: the loss of 'reinforce'"),
        ([TIS, "objective.rejected_tokens=leave"], "objective.rejected_tokens: leave has no effect"),
    ],
)
def test_warned_about(overrides: list[str], expected: str) -> None:
    found = warnings_for(job(*overrides))
    assert len(found) == 1 and found[0].startswith(expected)


OWN = """
import torch
from algs.method import MethodParams, PolicyMethod
from algs.records import Correction, Groups, PolicyTokens, TokenLoss
class Plain(PolicyMethod):
    class Params(MethodParams):
        pass
    def loss(self, t): return TokenLoss(-t.advantages * t.logprobs)
class Broken(Plain):
    def advantages(self, groups): return groups.rewards
    def loss(self, t): return TokenLoss(t.nothing)
class Bare(Plain):
    def advantages(self, groups): return groups.rewards[:-1]
class Numbers(Plain):
    def advantages(self, groups): return groups.rewards.tolist()
class Undeclared(Plain):
    def advantages(self, groups): return groups.rewards
    def loss(self, t): return TokenLoss(-t.advantages * t.logprobs + (t.logprobs - t.ref_logprobs) ** 2)
class Critical(Plain):
    def needs(self): return frozenset({"values"})
    def advantages(self, groups): return groups.token_rewards
    def returns(self, groups): return groups.rewards
class Mistyped(Plain):
    def needs(self): return frozenset({"ref_logprob"})
    def advantages(self, groups): return groups.rewards
def squared(t: PolicyTokens): return Correction(torch.exp(2 * (t.old_logprobs - t.behavior_logprobs)), t.logprobs < 0)
def weights_only(t: PolicyTokens): return torch.exp(t.old_logprobs - t.behavior_logprobs)
def failing(groups: Groups): return groups.rewards / groups.nothing
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "my_rules_lab.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            [method("'my_rules_lab:Broken'")],
            "algorithm.name: loss() of 'my_rules_lab:Broken' fails on made-up data: AttributeError: 'PolicyTokens' object "
            "has no attribute 'nothing' (line 11 of ",
        ),
        ([method("'my_rules_lab:Plain'")], "algorithm.name: 'my_rules_lab:Plain' defines no advantage"),
        (
            [method("'my_rules_lab:Bare'")],
            "algorithm.name: advantages() of 'my_rules_lab:Bare' gave (7,) for 8 responses of 15 tokens; it must",
        ),
        ([method("'my_rules_lab:Numbers'")], "advantages() of 'my_rules_lab:Numbers' gave a list for 8 responses"),
        (
            [method("'my_rules_lab:Undeclared'")],
            "algorithm.name: the loss of 'my_rules_lab:Undeclared' reads ref_logprobs, which its needs() must name",
        ),
        (
            [method("'my_rules_lab:Mistyped'")],
            "algorithm.name: needs() of 'my_rules_lab:Mistyped' names ref_logprob; the optional fields of PolicyTokens are "
            "ref_logprobs, values, old_values, returns",
        ),
        ([method("'my_rules_lab:Critical'")], "returns() of 'my_rules_lab:Critical' gave (8,) for 15 tokens"),
        (
            ["objective.corrections=[token_truncate, my_rules_lab:squared]"],
            "objective.corrections: token_truncate and my_rules_lab:squared each multiply by pi_old / mu",
        ),
        (
            ["objective.corrections=[veto, my_rules_lab:weights_only]"],
            "objective.corrections.1: my_rules_lab:weights_only fails on made-up data: TypeError: returned a Tensor, not an",
        ),
        (
            ["objective.advantage=my_rules_lab:failing"],
            "objective.advantage: my_rules_lab:failing fails on made-up data: AttributeError: 'Groups' object has no",
        ),
    ],
)
def test_parts_of_a_users_own_are_tried_before_anything_starts(own: None, overrides: list[str], expected: str) -> None:
    assert expected in refusal(*overrides)


def test_a_method_of_a_users_own_may_leave_the_advantage_to_the_objective(own: None) -> None:
    config = job(method("'my_rules_lab:Plain'"), "objective.advantage=rloo")
    assert config.objective.advantage is not None


KL_COV = """
from algs import advantages
from algs.method import MethodParams, PolicyMethod
from algs.records import TokenLoss


class KLCov(PolicyMethod):
    class Params(MethodParams):
        share: float = 0.0002

    def advantages(self, groups):
        return advantages.group_zscore(groups)

    def loss(self, t):
        covariance = (t.advantages - t.advantages.mean()) * (t.logprobs - t.logprobs.mean()).detach()
        top = covariance.topk(int(self.params.share * len(covariance))).indices
        kl = (t.logprobs - t.old_logprobs)[top].abs()
        return TokenLoss((-t.advantages * t.logprobs).index_add(0, top, kl))


class Likely(KLCov):
    data = "demonstrations"

    def loss(self, t):
        return TokenLoss(-t.logprobs * (t.logprobs > t.logprobs.mean()))
"""


@pytest.fixture
def kl_cov(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "kl_cov_lab.py").write_text(KL_COV, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return "kl_cov_lab"


def test_a_method_that_depends_on_the_split_is_refused(kl_cov: str) -> None:
    """KL-Cov takes a share of the micro-batch's tokens: named, with what differs and the way out, before anything starts."""
    text = refusal(method(f"'{kl_cov}:KLCov'"))
    assert f"algorithm.name: '{kl_cov}:KLCov' depends on how an update is cut into micro-batches" in text
    assert "give another loss" in text and "let update_sums() return" in text
    with pytest.raises(ConfigError, match="'kl_cov_lab:Likely' depends on how an update is cut"):
        load("configs/sft.yaml", SLConfig, [method(f"'{kl_cov}:Likely'")])
