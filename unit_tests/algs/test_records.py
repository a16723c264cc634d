"""Pairs of a micro-batch: found in any order, refused when not whole."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from algs.records import PolicyTokens


def tokens(group: list[int], chosen: list[bool]) -> PolicyTokens:
    """Two tokens for every response."""
    n = 2 * len(group)
    zeros = torch.zeros(n)
    sequence = torch.arange(len(group)).repeat_interleave(2)
    return PolicyTokens(
        zeros, zeros, zeros, zeros, zeros, sequence, torch.tensor(group), zeros.long(), chosen=torch.tensor(chosen)
    )


def test_pairs_come_in_the_order_of_group_and_go_back_to_their_tokens() -> None:
    t = tokens([7, 2, 7, 2, 4, 4], [False, True, True, False, True, False])
    x = torch.arange(6.0, requires_grad=True)
    chosen, rejected = t.pairs(x)
    assert chosen.tolist() == [1, 4, 2]
    assert rejected.tolist() == [3, 5, 0]
    back = t.on_pair_tokens(chosen * torch.tensor([1.0, 10.0, 100.0]))
    assert back.tolist() == [200, 200, 1, 1, 200, 200, 1, 1, 40, 40, 40, 40]
    (gradient,) = torch.autograd.grad(back.sum(), x)
    assert gradient.tolist() == [0, 4, 400, 0, 40, 0]


@pytest.mark.parametrize(
    ("group", "chosen"),
    [
        ([0, 0, 1], [True, False, True]),
        ([0, 0], [True, True]),
        ([0, 1], [True, False]),
        ([0, 0, 0, 0], [True, True, False, False]),
        ([0, 0, 1, 1], [True, False, False, False]),
        ([0, 1, 1, 2], [True, True, False, False]),
    ],
)
def test_broken_pairs_are_refused(group: list[int], chosen: list[bool]) -> None:
    with pytest.raises(ValueError, match="one chosen and one rejected"):
        tokens(group, chosen).pairs(torch.zeros(len(group)))


def test_pairs_are_sorted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    t = tokens([0, 0], [True, False])
    t.pairs(torch.zeros(2))
    monkeypatch.setattr(torch.Tensor, "argsort", None)  # a second sort would fail
    t.pairs(torch.ones(2))
    t.on_pair_tokens(torch.ones(1))


def test_a_trajectory_without_tokens_here_has_a_mean_of_0() -> None:
    """0, and not the NaN of 0 / 0, which would poison the sum over trajectories."""
    t = tokens([0, 1], [True, False])
    t = dataclasses.replace(t, group=torch.tensor([0, 1, 1]))  # the third has no token
    assert t.sequence_mean(torch.tensor([1.0, 3.0, 5.0, 5.0])).tolist() == [2, 5, 0]
