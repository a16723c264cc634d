"""A reward with figures beside it that are logged and never paid: tokens, calls, tests run."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Counted:
    """What a reward function may return in place of its number or named numbers.

    `counters` are logged by name as parts are, `reward/<function>/<counter>`, the mean over responses; they do not
    count in the sum.
    """

    value: float | dict[str, float]
    counters: dict[str, float] = field(default_factory=dict)
