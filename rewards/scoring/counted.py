"""A reward that comes with counters, such as tokens and calls, which are logged and never paid."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Counted:
    """A return value of a reward function: its number or named numbers, and counters.

    The mean of each counter over responses is logged as `reward/<function>/<counter>`. Counters are not in the sum.
    """

    value: float | dict[str, float]
    counters: dict[str, float] = field(default_factory=dict)
