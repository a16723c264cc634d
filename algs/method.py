"""The base class of methods, and how a method declares its parameters.

A method is one file with a `Params` block, an advantage on whole groups, and a loss on the action tokens of a
micro-batch. The trainer does everything else, in the same way for all methods: forward pass, temperature, packing,
aggregation, accumulation, gradient clipping, optimizer, metrics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, dataclass_transform

from torch import Tensor

from algs.records import Groups, PolicyTokens, TokenLoss


def param(default: Any, help: str, **bounds: Any) -> Any:
    """Declare a field of a `Params` block: its default, one sentence on what it does, and its bounds.

    `bounds` are `ge`, `gt`, `le` and `lt`. The configuration layer enforces them and prints `help`.
    """
    return dataclasses.field(default=default, metadata={"help": help, **bounds})


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity, as members of type annotations must be
class Knob:
    """The help text and the bounds that `knob` gives to a function's parameter."""

    help: str
    bounds: Mapping[str, float]


def knob(help: str, **bounds: float) -> Knob:
    """Describe a parameter of an advantage or correction: `cap: Annotated[float, knob("Largest weight.", gt=0)] = 2`.

    The configuration layer reads this; the function itself gets a plain number.
    """
    return Knob(help, bounds)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(param,))
class MethodParams:
    """The base class of a method's `Params`. A subclass lists annotated fields and becomes a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)


class PolicyMethod:
    """The base class of every method. A subclass declares `Params` and defines `advantages` and `loss`."""

    Params: ClassVar[type[MethodParams]]
    aggregation: ClassVar[str] = "token_mean"  # the paper's or its recipe's; objective.aggregation overrides it
    # What the method learns from: "prompts" that the policy answers itself (reinforcement learning), or rows of
    # "demonstrations", of "pairs" (a chosen and a rejected response), or of "labels" (a response, and whether it is
    # desirable).
    data: ClassVar[str] = "prompts"

    def __init__(self, params: Any) -> None:
        self.params = params

    def needs(self) -> frozenset[str]:
        """Return the optional `PolicyTokens` fields that the trainer must compute for this method and its parameters.

        They are "ref_logprobs" and "values" (which takes a critic).
        """
        return frozenset()

    def advantages(self, groups: Groups) -> Tensor:
        """Return the advantage of each trajectory, [S] float32, or of each action token, [N].

        The advantage of a trajectory is put on all its action tokens.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no advantage")

    def returns(self, groups: Groups) -> Tensor:
        """Return what the critic learns to predict, [N] float32. Only methods that need "values" define this."""
        raise NotImplementedError(f"{type(self).__name__} has a critic but defines no returns")

    def update_sums(self, t: PolicyTokens) -> dict[str, Tensor]:
        """Return per-token quantities, [N] each, whose sums over the whole update the loss needs before it can begin.

        Defining this costs one forward pass without gradient per update. The sums are in `t.update_sums`.
        """
        return {}

    def loss(self, t: PolicyTokens) -> TokenLoss:
        """Return the loss of each action token, to be minimised."""
        raise NotImplementedError(f"{type(self).__name__} defines no loss")
