"""The base class a method fills in, and how its parameters are written down.

A method is one file: a `Params` block, an advantage on whole groups, a loss on the action tokens of a micro-batch.
Everything else (forward pass, temperature, packing, aggregation, accumulation, clipping, stepping, metrics) is the
trainer's, once, for all methods.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, dataclass_transform

from torch import Tensor

from algs.records import Groups, PolicyTokens, TokenLoss


def param(default: Any, help: str, **bounds: Any) -> Any:
    """A field of a `Params` block: its default, one sentence on what it does, and bounds.

    `bounds` are `ge`, `gt`, `le`, `lt` (numbers); the configuration layer enforces them and prints `help`.
    """
    return dataclasses.field(default=default, metadata={"help": help, **bounds})


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity, as members of type annotations must be
class Knob:
    """What `knob` says about a function's parameter."""

    help: str
    bounds: Mapping[str, float]


def knob(help: str, **bounds: float) -> Knob:
    """The same for a parameter of an advantage or correction: `cap: Annotated[float, knob("Largest weight.", gt=0)] = 2`.

    Read by the configuration layer; the function itself sees a plain number.
    """
    return Knob(help, bounds)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(param,))
class MethodParams:
    """Base of a method's `Params`. Subclasses list annotated fields; they become frozen keyword-only dataclasses."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)


class PolicyMethod:
    """Base of every method. Subclass, declare `Params`, write `advantages` and `loss`."""

    Params: ClassVar[type[MethodParams]]
    aggregation: ClassVar[str] = "token_mean"  # the paper's; objective.aggregation overrides it
    # What it learns from: "prompts" it answers itself (reinforcement learning), or rows of "demonstrations", of "pairs" (a
    # chosen and a rejected response), or of "labels" (a response and whether it is desirable).
    data: ClassVar[str] = "prompts"

    def __init__(self, params: Any) -> None:
        self.params = params

    def needs(self) -> frozenset[str]:
        """Return the optional `PolicyTokens` fields that the trainer must compute for this method under its parameters:
        "ref_logprobs", "values" (a critic)."""
        return frozenset()

    def advantages(self, groups: Groups) -> Tensor:
        """Advantage of each trajectory, [S] float32, put on every action token of it; or of each action token, [N]."""
        raise NotImplementedError(f"{type(self).__name__} defines no advantage")

    def returns(self, groups: Groups) -> Tensor:
        """What the critic learns to predict, [N] float32; asked of methods that need "values"."""
        raise NotImplementedError(f"{type(self).__name__} has a critic but defines no returns")

    def update_sums(self, t: PolicyTokens) -> dict[str, Tensor]:
        """Per-token quantities, [N] each, whose sums over the whole optimizer step the loss needs before it can begin.

        Defining this costs a forward pass without gradient per optimizer step; the sums come as `t.update_sums`.
        """
        return {}

    def loss(self, t: PolicyTokens) -> TokenLoss:
        """Loss of each action token, to be minimised."""
        raise NotImplementedError(f"{type(self).__name__} defines no loss")
