"""Leave out groups that give no gradient: DAPO's dynamic sampling (arXiv 2503.14476, section 3.2), for any reward."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from plugins.marks import group_filter
from records.rollout import Group, paid_alike


@group_filter(refill=True)
def zero_variance(group: Group, tolerance: Annotated[float, Field(ge=0)] = 1e-6) -> bool:
    """Keep a group unless the rewards in its baseline all lie within `tolerance`: then every advantage is 0."""
    return not paid_alike(group.baseline, tolerance)
