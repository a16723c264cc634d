"""Tabulate how a method weighs grad log pi, by the ratio, or by the margin for methods that learn from pairs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from algs.introspection.method_facts import gradient_weight, label_weights, likelihood_weight, pair_weights
from algs.method import PolicyMethod
from algs.records import PolicyTokens, TokenLoss

RATIOS = (0.1, 0.5, 0.8, 1.0, 1.2, 1.28, 2.0, 5.0, 6.0, 10.0)
MARGINS = (-20.0, -10.0, -5.0, -2.0, -1.0, 0.0, 1.0, 2.0, 5.0, 10.0, 20.0)
PROBABILITIES = (0.01, 0.1, 0.5, 0.9, 0.99)


@dataclasses.dataclass(frozen=True)
class Kind:
    """The points at which methods of one kind are tabulated, and the headings."""

    title: str
    head: str  # heading of the first column
    points: tuple[float, ...]


KINDS = {  # the keys are the values of PolicyMethod.data
    "prompts": Kind("Weight on grad log pi of a one-token response, r = pi / pi_old, mu = pi_old", "r", RATIOS),
    "pairs": Kind(
        "Weight on grad log pi of the two responses of a pair, of one token each; h = log(pi / pi_ref) of the chosen "
        "minus\nthat of the rejected. (Of a reward model: weight on the gradient of the score; h = difference of the "
        "scores.)",
        "h",
        MARGINS,
    ),
    "labels": Kind("Weight on grad log pi of a one-token response, h = log(pi / pi_ref)", "h", MARGINS),
    "demonstrations": Kind("Weight on grad log pi of a trained token", "pi", PROBABILITIES),
}


@dataclasses.dataclass(frozen=True)
class Weights:
    """-dL/dlog pi at each point, and the metrics of the loss."""

    kind: Kind
    points: tuple[float, ...]
    curves: dict[str, Tensor]  # [N] each, by the name of the column
    metrics: tuple[str, ...]  # names of the loss's metrics
    step_metrics: dict[str, float]  # metrics that depend on all tokens together, computed over the table's tokens


def weights(method: PolicyMethod, points: Sequence[float] | None = None) -> Weights:
    """Return how the method weighs grad log pi at each point. Sums over the update are taken over these tokens alone.

    Raises:
        ValueError: the method's `data` is no known kind.
    """
    if method.data not in KINDS:
        raise ValueError(f"{type(method).__name__}.data is '{method.data}'; it must be one of {', '.join(KINDS)}")
    metrics: dict[str, Tensor] = {}

    def recording_loss(t: PolicyTokens) -> TokenLoss:
        answer = method.loss(t)
        metrics.update(answer.metrics)
        return answer

    recorder: Any = SimpleNamespace(loss=recording_loss, update_sums=method.update_sums)
    kind = KINDS[method.data]
    x = torch.tensor(kind.points if points is None else points, dtype=torch.float64)
    if method.data == "pairs":
        curves = dict(zip(("chosen", "rejected"), pair_weights(recorder, x), strict=True))
    elif method.data == "labels":
        curves = dict(zip(("desirable", "undesirable"), label_weights(recorder, x), strict=True))
    elif method.data == "demonstrations":
        curves = {"weight": likelihood_weight(recorder, x.log())}
    else:
        negative, positive = (gradient_weight(recorder, x.log(), a) for a in (-1.0, 1.0))
        curves = {"A = +1": positive, "A = -1": negative}
    shared: dict[str, float] = {}
    if type(method).update_sums is not PolicyMethod.update_sums:
        shared = {name: float(y[0]) for name, y in metrics.items() if bool((y == y[0]).all())}
    return Weights(kind, tuple(x.tolist()), curves, tuple(metrics), shared)


def lines(table: Weights) -> list[str]:
    """Return the table as lines of text."""
    rows = [table.kind.title, f"{table.kind.head:>8}" + "".join(f"{name:>13}" for name in table.curves)]
    for i, x in enumerate(table.points):
        rows.append(f"{x:>8g}" + "".join(f"{_rounded(curve[i].item()):>13}" for curve in table.curves.values()))
    return rows + [f"{name} over the tokens of this table: {x:.4g}" for name, x in table.step_metrics.items()]


def _rounded(weight: float) -> str:
    rounded = round(weight, 3)
    return "0" if math.isclose(rounded, 0, abs_tol=1e-9) else f"{rounded:.3f}"
