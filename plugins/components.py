"""The advantage, the corrections and the aggregation that the `objective:` block names: checked, then built."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from plugins.parameters import model_of_function

if TYPE_CHECKING:
    from torch import Tensor

    from algs.method import PolicyMethod
    from algs.records import Correction, Groups, PolicyTokens
    from configs.blocks.block import Named
    from configs.blocks.objective import Objective
    from configs.blocks.rl import RLConfig
    from plugins.objective_parts import Kind


def found(kind: Kind, name: str) -> Callable[..., Any]:
    """The function that is named.

    Raises:
        ValueError: there is none (with the nearest name), it does not import, or is of another kind.
    """
    from plugins.objective_parts import find_function  # imports torch; --help must not

    return find_function(kind, name)


def checked_params(kind: Kind, name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The function's parameters with defaults filled in.

    Raises:
        ValidationError: located at the wrong parameters.
        ValueError: the function is not found, or has parameters that cannot be given by name.
    """
    return model_of_function(found(kind, name)).model_validate(given).model_dump()


def advantage_for(config: RLConfig, method: PolicyMethod) -> Callable[[Groups], Tensor]:
    """What makes the advantages: the function in `objective.advantage`, or the method's own."""
    named = config.objective.advantage
    return method.advantages if named is None else _bound("advantage", named)


def corrections_for(objective: Objective) -> list[Callable[[PolicyTokens], Correction]]:
    """The functions in `objective.corrections` with their parameters, in order. They can be pickled."""
    return [_bound("correction", named) for named in objective.corrections]


def aggregation_for(objective: Objective, method: PolicyMethod) -> str:
    """One of algs.parts.aggregation.MODES: `objective.aggregation`, or that of the method's paper."""
    return objective.aggregation or method.aggregation


def _bound(kind: Kind, named: Named) -> Callable[[Any], Any]:
    return functools.partial(found(kind, named.function), **named.params)
