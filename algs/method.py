"""The records a method sees, the base class it fills in, and how a name in the config becomes a method.

A method is one file: a `Params` block, an advantage on whole groups, a loss on the action tokens of a micro-batch.
Everything else (forward pass, temperature, packing, aggregation, accumulation, clipping, stepping, metrics) is the
trainer's, once, for all methods.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any, ClassVar, dataclass_transform

import torch
from torch import Tensor


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


@dataclasses.dataclass(frozen=True)
class Groups:
    """What an advantage sees: S scored trajectories of P prompts, before any sharding, packing or dropping."""

    rewards: Tensor  # [S] float32
    group: Tensor  # [S] int64 in 0..P-1; groups may be ragged
    lengths: Tensor  # [S] int64, action tokens per trajectory

    def sum_by_group(self, x: Tensor) -> Tensor:
        """Sum over each group. x [S] -> [P]."""
        groups = int(self.group.max()) + 1 if self.group.numel() else 0
        return x.new_zeros(groups).index_add_(0, self.group, x)

    @property
    def sizes(self) -> Tensor:
        """Trajectories per group, [P] float32."""
        return self.sum_by_group(torch.ones_like(self.rewards))


@dataclasses.dataclass(frozen=True)
class PolicyTokens:
    """What a loss sees: the N action tokens of one micro-batch, flattened. There is no padding and no mask here.

    All `[N]` tensors are float32 unless noted. Only `logprobs` and `entropy` (and `values`) carry gradient.
    """

    logprobs: Tensor  # [N] log pi, at the sampling temperature
    behavior_logprobs: Tensor  # [N] log mu, as the engine sampled them
    old_logprobs: Tensor  # [N] log pi_old, the trainer's policy at the start of the step
    advantages: Tensor  # [N]
    entropy: Tensor  # [N] in nats, at the sampling temperature
    sequence: Tensor  # [N] int64 in 0..S-1, the trajectory a token belongs to
    group: Tensor  # [S] int64, the prompt a trajectory belongs to
    staleness: Tensor  # [N] int64, policy versions between sampling and now
    ref_logprobs: Tensor | None = None  # [N] log pi_ref; present when the method's needs() names it
    values: Tensor | None = None  # [N] critic
    returns: Tensor | None = None  # [N]

    def sequence_sum(self, x: Tensor) -> Tensor:
        """Sum over each trajectory. x [N] -> [S]."""
        return x.new_zeros(self.group.shape[0]).index_add_(0, self.sequence, x)

    def sequence_mean(self, x: Tensor) -> Tensor:
        """Mean over each trajectory's tokens. x [N] -> [S]; a trajectory with no token here gives 0."""
        return self.sequence_sum(x) / self.sequence_sum(torch.ones_like(x)).clamp(min=1)


@dataclasses.dataclass(frozen=True)
class TokenLoss:
    """A method's answer: the loss of each token, and named per-token metrics (reduced as sum and count, never as means
    of means)."""

    values: Tensor  # [N] float32, minimised
    metrics: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # each [N], detached by the trainer


class PolicyMethod:
    """Base of every method. Subclass, declare `Params`, write `advantages` and `loss`."""

    Params: ClassVar[type[MethodParams]]

    def __init__(self, params: Any) -> None:
        self.params = params

    def needs(self) -> frozenset[str]:
        """Optional `PolicyTokens` fields this method reads under its parameters, e.g. {"ref_logprobs"}."""
        return frozenset()

    def advantages(self, groups: Groups) -> Tensor:
        """Advantage of each trajectory, [S] float32; the trainer puts it on every action token of the response."""
        raise NotImplementedError(f"{type(self).__name__} defines no advantage")

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
