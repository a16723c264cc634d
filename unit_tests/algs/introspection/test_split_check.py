"""A method whose answer depends on how an update is cut is told so, with what differs and the way out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from algs.introspection.split_check import split_problem
from algs.records import PolicyTokens, TokenLoss
from plugins.kinds import find, listed


def plain(t: PolicyTokens) -> torch.Tensor:
    return -t.advantages * t.logprobs


def covariance(t: PolicyTokens) -> torch.Tensor:
    logprobs = t.logprobs.detach()
    return (t.advantages - t.advantages.mean()) * (logprobs - logprobs.mean())


def kl_cov(t: PolicyTokens, share: float = 0.0002) -> TokenLoss:
    """KL-Cov as verl has it: the tokens of largest covariance in the micro-batch get a KL penalty."""
    top = covariance(t).topk(int(share * len(t.logprobs))).indices
    return TokenLoss(plain(t).index_add(0, top, (t.logprobs - t.old_logprobs)[top].abs()))


def mean_metric(t: PolicyTokens) -> TokenLoss:
    return TokenLoss(plain(t), {"share": (t.advantages > 0).float().mean()})


def best_metric(t: PolicyTokens) -> TokenLoss:
    return TokenLoss(plain(t), {"best": t.advantages.max().expand_as(t.advantages)})


def centred_by_group(t: PolicyTokens) -> TokenLoss:
    by_group = torch.zeros(int(t.group.max()) + 1).index_add_(0, t.group, t.sequence_sum(t.advantages))
    return TokenLoss(plain(t) * by_group[t.group][t.sequence])


def by_entropy(t: PolicyTokens) -> TokenLoss:
    """The value is the same, its derivative is not."""
    factor = t.entropy.max() / t.entropy.max().detach()
    return TokenLoss(plain(t).detach() + t.logprobs - t.logprobs.detach() + factor - 1)


def critic_by_batch(t: PolicyTokens) -> TokenLoss:
    assert t.values is not None
    return TokenLoss(plain(t), critic=(t.values - t.values.detach().mean()).square())


def method_of(loss: Any, update_sums: Any = lambda t: {}, data: str = "prompts") -> Any:
    return SimpleNamespace(loss=loss, update_sums=update_sums, data=data)


@pytest.mark.parametrize(
    ("loss", "different"),
    [
        (kl_cov, "another loss, gradient by logprobs"),
        (lambda t: kl_cov(t, 0.2), "another loss, gradient by logprobs"),
        (mean_metric, "another metric share"),
        (best_metric, "another metric best"),
        (centred_by_group, "another loss, gradient by logprobs"),
        (by_entropy, "another gradient by entropy"),
        (critic_by_batch, "another loss, gradient by values"),
    ],
)
def test_what_depends_on_the_split_is_named_with_the_way_out(loss: Any, different: str) -> None:
    found = split_problem("mine", method_of(loss))
    assert found is not None and found.startswith("'mine' depends on how an update is cut into micro-batches")
    assert f"{different}." in found and "let update_sums() return" in found


def test_sums_over_the_update_make_it_whole() -> None:
    """A covariance whose means come from update_sums() passes; a maximum there is no sum of the parts'."""

    def sums(t: PolicyTokens) -> dict[str, torch.Tensor]:
        return {"a": t.advantages, "logp": t.logprobs, "tokens": torch.ones_like(t.logprobs)}

    def loss(t: PolicyTokens) -> TokenLoss:
        s = t.update_sums
        centred = (t.advantages - s["a"] / s["tokens"]) * (t.logprobs.detach() - s["logp"] / s["tokens"])
        return TokenLoss(plain(t) * centred, {"covariance": centred})

    assert split_problem("mine", method_of(loss, sums)) is None
    top = method_of(loss, lambda t: {**sums(t), "top": covariance(t).max().expand_as(t.logprobs)})
    assert "another sum top of update_sums()" in str(split_problem("mine", top))


def test_pairs_are_not_cut() -> None:
    def margin(t: PolicyTokens) -> TokenLoss:
        chosen, rejected = t.pairs(t.sequence_sum(t.logprobs))
        return TokenLoss(t.on_pair_tokens(rejected - chosen), {"margin": chosen - rejected})

    assert split_problem("mine", method_of(margin, data="pairs")) is None


@pytest.mark.parametrize("name", listed("method"))
def test_ours_do_not_depend_on_it(name: str) -> None:
    method = find("method", name)
    assert split_problem(name, method(method.Params())) is None


def test_numbers_that_overflow_everywhere_are_no_difference() -> None:
    def product(t: PolicyTokens) -> TokenLoss:
        return TokenLoss(plain(t) * t.sequence_sum(40 * (t.logprobs - t.old_logprobs)).exp()[t.sequence])

    assert split_problem("mine", method_of(product)) is None
