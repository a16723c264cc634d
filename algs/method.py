"""The base class a method fills in, and how a name in the config becomes a method.

A method is one file: a `Params` block, an advantage on whole groups, a loss on the action tokens of a micro-batch.
Everything else (forward pass, temperature, packing, aggregation, accumulation, clipping, stepping, metrics) is the
trainer's, once, for all methods.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any, ClassVar, dataclass_transform

from torch import Tensor

from algs.records import Groups, PolicyTokens, TokenLoss


def param(default: Any, help: str, **bounds: Any) -> Any:
    """A field of a `Params` block: its default, one sentence on what it does, and bounds.

    `bounds` are `ge`, `gt`, `le`, `lt` (numbers); the configuration layer enforces them and prints `help`.
    """
    return dataclasses.field(default=default, metadata={"help": help, **bounds})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(param,))
class MethodParams:
    """Base of a method's `Params`. Subclasses list annotated fields; they become frozen keyword-only dataclasses."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)


class PolicyMethod:
    """Base of every method. Subclass, declare `Params`, write `advantages` and `loss`."""

    Params: ClassVar[type[MethodParams]]
    aggregation: ClassVar[str] = "token_mean"  # the paper's; objective.aggregation overrides it

    def __init__(self, params: Any) -> None:
        self.params = params

    def needs(self) -> frozenset[str]:
        """Optional `PolicyTokens` fields this method reads under its parameters: "ref_logprobs", "values" (a critic)."""
        return frozenset()

    def advantages(self, groups: Groups) -> Tensor:
        """Advantage of each trajectory, [S] float32, put on every action token of it; or of each action token, [N]."""
        raise NotImplementedError(f"{type(self).__name__} defines no advantage")

    def returns(self, groups: Groups) -> Tensor:
        """What the critic learns to predict, [N] float32; asked of methods that need "values"."""
        raise NotImplementedError(f"{type(self).__name__} has a critic but defines no returns")

    def step_sums(self, t: PolicyTokens) -> dict[str, Tensor]:
        """Per-token quantities, [N] each, whose sums over the whole optimizer step the loss needs before it can begin.

        Defining this costs a forward pass without gradient per optimizer step; the sums come as `t.step_sums`.
        """
        return {}

    def loss(self, t: PolicyTokens) -> TokenLoss:
        """Loss of each action token, to be minimised."""
        raise NotImplementedError(f"{type(self).__name__} defines no loss")


def find_method(name: str) -> type[PolicyMethod]:
    """The method class a config names: `grpo` is the class in algs/grpo.py, `my_lab.my_loss:Mine` a user's own.

    Raises:
        ValueError: the module does not import, or holds no (or several) method classes; the message says which.
    """
    module_name, _, class_name = name.partition(":")
    if not class_name and "." not in module_name:
        module_name = f"algs.{module_name}"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ValueError(f"method '{name}': {module_name} does not import: {error}") from error
        raise ValueError(f"method '{name}': there is no module {module_name}") from error
    if class_name:
        found = getattr(module, class_name, None)
        if not (inspect.isclass(found) and issubclass(found, PolicyMethod)):
            raise ValueError(f"method '{name}': {module_name} has no PolicyMethod called {class_name}")
        return found
    own = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, PolicyMethod) and value.__module__ == module.__name__
    ]
    if len(own) != 1:
        names = ", ".join(value.__name__ for value in own) or "none"
        raise ValueError(
            f"method '{name}': {module_name} must define one PolicyMethod, found {names}; use module:Class"
        )
    return own[0]
