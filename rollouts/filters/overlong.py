"""Leave cut responses out of the loss, as DAPO's overlong filtering does (arXiv 2503.14476, section 3.4)."""

from __future__ import annotations

from plugins.marks import group_filter
from records.rollout import Group


@group_filter(refill=False)
def overlong(group: Group) -> list[bool]:
    """Keep the responses that were not cut at the length limit."""
    return [not t.truncated for t in group.trajectories]
