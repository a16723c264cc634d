"""Find out whether a method's answer depends on how an update is cut into micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from algs.introspection.method_facts import DIFFERENTIABLE, LENGTHS, made_up_tokens
from algs.method import PolicyMethod
from algs.records import PolicyTokens

RESPONSES = ((4, 1, 3), (5, 0, 2))  # the made-up responses in two parts; no group is whole in either
PAIRS = ((3, 2), (5, 0, 4, 1))  # for a method that learns from pairs, which are never cut
LONG = tuple(700 * length for length in LENGTHS)  # 11,200 tokens, of which the top 0.02 % are still some
TOLERANCE = 1e-3  # of the sizes that are compared: float32 adds up in another order


def split_problem(name: str, method: PolicyMethod) -> str | None:
    """Return a sentence on what differs between the same tokens in one micro-batch and in two, None when nothing does.

    Loss, gradient, metrics and update_sums() are compared. As in training, t.update_sums is that of all tokens.
    """
    for lengths in (LENGTHS, LONG):
        if different := list(_differences(method, made_up_tokens(lengths))):
            return (
                f"'{name}' depends on how an update is cut into micro-batches: the same tokens in one and in two give "
                f"another {', '.join(different)}. A loss sees only the responses that fit on a device together; a number "
                "over all of them must be made of sums: let update_sums() return what is summed, one number per token, "
                "and read t.update_sums in loss(); what needs whole groups belongs in advantages()"
            )
    return None


def _differences(method: PolicyMethod, tokens: PolicyTokens) -> Iterator[str]:
    cut = PAIRS if method.data == "pairs" else RESPONSES
    places = [torch.cat([(tokens.sequence == i).nonzero()[:, 0] for i in part]) for part in cut]
    parts = [_part(tokens, part, place) for part, place in zip(cut, places, strict=True)]
    with torch.no_grad():
        summed = [method.update_sums(part) for part in (tokens, *parts)]
    yield from (f"sum {name} of update_sums()" for name in _unequal_totals(summed[0], summed[1:]))
    sums = {name: values.sum() for name, values in summed[0].items()}
    whole, *answers = [_answer(method, dataclasses.replace(t, update_sums=sums)) for t in (tokens, *parts)]
    for what, expected in whole[0].items():
        found, expected = torch.cat([answer[0][what] for answer in answers]), expected[torch.cat(places)]
        size = expected.abs().nan_to_num(0, 0).mean().item() + 1e-6
        if not torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE * size, equal_nan=True):
            yield what
    yield from (f"metric {name}" for name in _unequal_totals(whole[1], [metrics for _, metrics in answers]))


def _part(tokens: PolicyTokens, responses: tuple[int, ...], places: Tensor) -> PolicyTokens:
    """Return a micro-batch of these responses in this order, whose tokens lie at `places`."""
    lengths = torch.bincount(tokens.sequence)[list(responses)]
    chosen = None if tokens.chosen is None else tokens.chosen[list(responses)]
    sequence = torch.repeat_interleave(torch.arange(len(responses)), lengths)
    per_token: dict[str, Any] = {
        field.name: getattr(tokens, field.name)[places]
        for field in dataclasses.fields(tokens)
        if field.name not in ("sequence", "group", "chosen", "update_sums") and getattr(tokens, field.name) is not None
    }
    return PolicyTokens(**per_token, sequence=sequence, group=tokens.group[list(responses)], chosen=chosen)


@torch.enable_grad()
def _answer(method: PolicyMethod, tokens: PolicyTokens) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the loss and its gradients, [N] each, and the metrics."""
    leaves = {name: getattr(tokens, name).detach().clone().requires_grad_() for name in DIFFERENTIABLE}
    answer = method.loss(dataclasses.replace(tokens, **leaves))
    total = answer.loss if answer.critic is None else answer.loss + answer.critic
    gradients: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if total.requires_grad:
        gradients = torch.autograd.grad(total.sum(), list(leaves.values()), allow_unused=True)
    by_name = zip(leaves, gradients, strict=True)
    named = {f"gradient by {name}": torch.zeros_like(total) if g is None else g for name, g in by_name}
    return {"loss": total.detach(), **named}, {name: x.detach() for name, x in answer.metrics.items()}


def _unequal_totals(whole: Mapping[str, Tensor], parts: Sequence[Mapping[str, Tensor]]) -> Iterator[str]:
    """Yield the names whose sum or number of entries over the parts is not that of the whole."""
    for name in sorted({*whole, *(name for part in parts for name in part)}):
        entries = [[part[name].double()] if name in part else [] for part in (whole, *parts)]
        size = sum(x.abs().sum().item() for x in entries[0])
        total, *others = [sum((x.sum() for x in given), torch.zeros(()).double()) for given in entries]
        count, *counts = [sum(x.numel() for x in given) for given in entries]
        close = torch.isclose(sum(others, torch.zeros(())), total, rtol=0, atol=TOLERANCE * size, equal_nan=True)
        if count != sum(counts) or not bool(close):
            yield name
