"""Leave cut responses out of the loss: they are no answers yet. DAPO's overlong filtering (arXiv 2503.14476, section 3.4)."""

from __future__ import annotations

from records.rollout import Group
from rollouts.filter import group_filter


@group_filter(refill=False)
def overlong(group: Group) -> list[bool]:
    """Keep the responses that were not cut at the length limit."""
    return [not t.truncated for t in group.trajectories]
