"""What the probes say of losses whose answer is known."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from algs import advantages, corrections
from algs.introspection.method_facts import (
    READABLE,
    caps_its_ratio,
    differentiates,
    gradient_weight,
    ignores_scale_of_a_group,
    ignores_zero_advantage,
    label_weights,
    likelihood_weight,
    made_up_groups,
    made_up_tokens,
    pair_weights,
    reads,
    rejects,
    rejects_agreement,
    weighs,
)
from algs.method import MethodParams, PolicyMethod
from algs.records import Correction, PolicyTokens, TokenLoss
from plugins.kinds import find, listed


def method_of(loss, update_sums=None) -> PolicyMethod:
    class Made(PolicyMethod):
        class Params(MethodParams):
            pass

    Made.loss = lambda self, t: loss(t)
    if update_sums is not None:
        Made.update_sums = lambda self, t: update_sums(t)
    return Made(Made.Params())


def plain(t: PolicyTokens) -> TokenLoss:
    return TokenLoss(-t.advantages * t.logprobs)


def effective_size(t: PolicyTokens) -> TokenLoss:
    """Reads mu through the sums over the step alone."""
    return TokenLoss(-t.update_sums["rho"] * t.advantages * t.logprobs)


def rho(t: PolicyTokens) -> dict[str, torch.Tensor]:
    return {"rho": torch.exp(t.logprobs - t.behavior_logprobs)}


CASES = {
    "reinforce": (method_of(plain), {"advantages"}, True),
    "constant": (method_of(lambda t: TokenLoss(torch.zeros_like(t.logprobs))), set(), True),
    "likelihood": (method_of(lambda t: TokenLoss(-t.logprobs)), set(), False),
    "entropy": (method_of(lambda t: TokenLoss(plain(t).loss - t.entropy)), {"advantages"}, False),
    "only in the gradient": (
        method_of(lambda t: TokenLoss((t.logprobs - t.logprobs.detach()) * t.old_logprobs)), {"old_logprobs"}, False,
    ),
    "kl": (
        method_of(lambda t: TokenLoss(plain(t).loss + (t.logprobs - t.ref_logprobs) ** 2)),
        {"advantages", "ref_logprobs"}, False,
    ),
    "step sums": (method_of(effective_size, rho), {"advantages", "behavior_logprobs"}, True),
    "critic": (
        method_of(lambda t: TokenLoss(plain(t).loss, critic=(t.values - t.returns) ** 2)),
        {"advantages", "values"}, False,
    ),
    "far behind a cap": (
        method_of(lambda t: TokenLoss(torch.exp(t.old_logprobs - t.behavior_logprobs).clamp(max=0.05) * t.logprobs)),
        {"old_logprobs", "behavior_logprobs"}, False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_a_loss_reads_and_whether_it_is_silent(name):
    method, read, silent = CASES[name]
    assert reads(method) == read <= set(READABLE)
    assert ignores_zero_advantage(method) is silent


def test_gradient_weights_of_known_losses():
    ratio = torch.tensor([0.1, 0.8, 1.0, 1.3, 6.0], dtype=torch.float64)
    clipped = method_of(
        lambda t: TokenLoss(
            -torch.minimum((r := (t.logprobs - t.old_logprobs).exp()) * t.advantages, r.clamp(0.8, 1.2) * t.advantages)
        )
    )
    assert gradient_weight(method_of(plain), ratio.log(), -0.5).tolist() == [-0.5] * 5
    assert gradient_weight(clipped, ratio.log(), 1.0) == pytest.approx([0.1, 0.8, 1.0, 0, 0])
    assert gradient_weight(clipped, ratio.log(), -torch.ones(5)) == pytest.approx([0, -0.8, -1.0, -1.3, -6.0])
    total = float(ratio.sum())  # the sums are taken over the given tokens
    assert gradient_weight(method_of(effective_size, rho), ratio.log(), 1.0) == pytest.approx([total] * 5)


def squared_margin(t: PolicyTokens) -> TokenLoss:
    """(h - 1)^2 of the sums' log-ratio."""
    chosen, rejected = t.pairs(t.sequence_sum(t.logprobs - t.ref_logprobs))
    return TokenLoss(t.on_pair_tokens((chosen - rejected - 1).square()))


def signed_scores(t: PolicyTokens) -> TokenLoss:
    return TokenLoss(torch.where(t.chosen, -t.values, t.values)[t.sequence] ** 3)


def test_weights_of_known_preference_losses():
    """Of a pair, per pair and not per token; of labels, per response; of demonstrations, per token."""
    margin = torch.tensor([-2.0, 0.0, 1.0, 3.0], dtype=torch.float64)
    chosen, rejected = pair_weights(method_of(squared_margin), margin)
    assert chosen.tolist() == pytest.approx([6, 2, 0, -4]) and (rejected == -chosen).all()
    scored, _ = pair_weights(method_of(signed_scores), margin)  # on each of the two tokens, as an ordinary token's loss
    assert scored.tolist() == pytest.approx([1.5, 0, 0.375, 3.375])
    pull = method_of(lambda t: TokenLoss(torch.where(t.chosen, -1.0, 2.0) * (t.logprobs - t.ref_logprobs).square()))
    desirable, undesirable = label_weights(pull, margin)
    assert desirable.tolist() == pytest.approx([-4, 0, 2, 6]) and undesirable.tolist() == pytest.approx([8, 0, -4, -12])
    focal = method_of(lambda t: TokenLoss(-t.logprobs.square() / 2))
    assert likelihood_weight(focal, margin - 4).tolist() == pytest.approx([-6, -4, -3, -1])


def halved(t: PolicyTokens) -> Correction:
    return Correction(torch.full_like(t.old_logprobs, 0.5), torch.ones_like(t.old_logprobs, dtype=torch.bool))


@pytest.mark.parametrize(
    ("correction", "does_weigh", "does_reject"),
    [
        (corrections.token_truncate, True, False),
        (corrections.token_mask, True, True),
        (functools.partial(corrections.token_mask, low=0.999, high=1.001), True, True),
        (corrections.sequence_truncate, True, False),
        (corrections.sequence_mask, True, True),
        (corrections.geometric_mask, False, True),
        (corrections.veto, False, True),
        (functools.partial(corrections.veto, threshold=2e-4), False, True),
        (halved, True, False),
    ],
)
def test_what_a_correction_does(correction, does_weigh, does_reject):
    assert weighs(correction) is does_weigh
    assert rejects(correction) is does_reject
    assert not rejects_agreement(correction)


def test_a_band_without_1_rejects_agreement():
    assert rejects_agreement(functools.partial(corrections.token_mask, low=1.001))
    assert rejects_agreement(functools.partial(corrections.geometric_mask, high=0.999))


def test_made_up_records_keep_the_contract():
    t = made_up_tokens()
    n = len(t.logprobs)
    assert all(len(getattr(t, name)) == n for name in (*READABLE, "entropy", "staleness", "old_values", "returns"))
    assert len(t.group) == int(t.sequence.max()) + 1
    assert [t.group[side].tolist() for side in (t.chosen, ~t.chosen)] == [[0, 1, 2], [0, 1, 2]]  # each group is a pair
    assert (t.logprobs < 0).all() and (t.advantages > 0).any() and (t.advantages < 0).any()
    for critic in (False, True):
        groups = made_up_groups((3, 1, 2), critic)
        assert groups.sizes.tolist() == [3, 1, 2] and len(set(groups.rewards.tolist())) == 6
        assert (groups.values is not None) is critic
        assert len(groups.token_rewards) == int(groups.lengths.sum()) == len(groups.sequence)
        assert math.isclose(float(groups.token_rewards.sum()), float(groups.rewards.sum()), rel_tol=1e-6)


def test_a_method_without_step_sums_weighs_single_tokens_one_by_one():
    cls = find("method", "cispo")
    ratio = torch.tensor([6.0, 0.5], dtype=torch.float64)
    assert gradient_weight(cls(cls.Params()), ratio.log(), 1.0) == pytest.approx([5.0, 0.5])
    assert gradient_weight(cls(cls.Params()), ratio[1:].log(), 1.0) == pytest.approx([0.5])


def test_what_is_in_the_graph_of_a_loss_is_found_by_differentiating_it():
    """Under ZeRO-3 a rank without data must go back through the same modules as the others; the first that are asked for may
    be those of an evaluation, which makes no graph."""
    classes = {name: find("method", name) for name in ("grpo", "ppo", "reward_model", "dpo")}
    with torch.no_grad():
        found = {name: differentiates(method(method.Params())) for name, method in classes.items()}
    assert found == {
        "grpo": {"logprobs"}, "ppo": {"logprobs", "values"}, "reward_model": {"values"}, "dpo": {"logprobs"},
    }  # fmt: skip


@pytest.mark.parametrize("name", listed("advantage"))
def test_only_a_division_by_the_groups_own_spread_makes_a_groups_scale_vanish(name):
    """The spread of the whole step, as of REINFORCE++, keeps what one group's rewards weigh against another's."""
    assert ignores_scale_of_a_group(getattr(advantages, name)) == (name == "group_zscore")


@pytest.mark.parametrize("name", [name for name, entry in listed("method").items() if entry.has_advantages])
def test_which_methods_are_a_truncated_importance_weight(name):
    """A cap keeps the token's gradient; a clip, a gate and the absence of a ratio are something else."""
    method = find("method", name)
    assert caps_its_ratio(method(method.Params())) == (name in ("aipo", "cispo", "scale_rl"))
