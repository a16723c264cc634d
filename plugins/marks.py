"""Decorators by which the author of a reward or a filter states facts about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def checked_by(rule: Callable[..., None]) -> Callable[[F], F]:
    """Attach to a function a rule on its parameters that annotations cannot express.

    The rule is called before a run starts, as `rule(**parameters)` with defaults filled in. It raises ValueError.
    """

    def marked(function: F) -> F:
        function.rule = rule  # type: ignore[attr-defined]
        return function

    return marked


def of_group(function: F) -> F:
    """Mark a reward function as one of a whole group: `f(group, **params)`.

    It is called when all members are generated and scored by the other parts; `trajectory.reward` is the sum so far,
    None where that failed. It returns a list with a reward function's value for each member, in the group's order.
    """
    function.of_group = True  # type: ignore[attr-defined]
    return function


def is_of_group(function: Callable[..., Any]) -> bool:
    """Return whether a reward function was marked with `of_group`."""
    return getattr(function, "of_group", False)


def asks_a_server(function: F) -> F:
    """Mark a reward function as one that asks a server, so that a dry run does not call it."""
    function.asks_a_server = True  # type: ignore[attr-defined]
    return function


def needs_a_server(function: Callable[..., Any]) -> bool:
    """Return whether a reward function was marked with `asks_a_server`."""
    return getattr(function, "asks_a_server", False)


def group_filter(refill: bool) -> Callable[[F], F]:
    """Mark a filter with whether further prompts are requested in place of groups that it leaves out whole.

    `refill` of the filter's block in the configuration overrides it.
    """

    def marked(function: F) -> F:
        function.refill = refill  # type: ignore[attr-defined]
        return function

    return marked
