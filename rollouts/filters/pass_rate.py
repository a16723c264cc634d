"""Keep prompts of medium difficulty; by default DAPO's dynamic sampling, 0 < correct < G (arXiv 2503.14476, eq. 11)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from plugins.marks import checked_by, group_filter
from records.rollout import Group


def _band(low: float, high: float, threshold: float) -> None:
    if low >= high:
        raise ValueError(f"low {low:g} is not below high {high:g}: no pass rate lies between them")


@group_filter(refill=True)
@checked_by(_band)
def pass_rate(
    group: Group,
    low: Annotated[float, Field(ge=0, le=1)] = 0.0,
    high: Annotated[float, Field(ge=0, le=1)] = 1.0,
    threshold: float = 0.5,
) -> bool:
    """Keep a group when low < pass rate < high, both bounds left out: by default some passed and some did not.

    The pass rate is the share of the responses in the baseline whose reward is at least `threshold`.
    """
    passed = [t.reward is not None and t.reward >= threshold for t in group.baseline]
    return low < sum(passed) / len(passed) < high
