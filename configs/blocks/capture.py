"""The block `capture:`, which says which updates a run keeps whole for the step debugger."""

from __future__ import annotations

from pydantic import Field

from configs.blocks.block import Block


class Capture(Block):
    """Updates kept whole (batch and weights), to be looked at with `python -m orchestration.step_debugger`."""

    steps: list[int] = Field(
        default_factory=list, description="Steps whose updates are kept. Skipped updates are kept in any case."
    )
    keep: int = Field(2, ge=1, description="How many updates are kept; older ones make room.")
