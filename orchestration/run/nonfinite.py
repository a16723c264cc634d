"""The messages about updates that held an Inf or NaN, and the error that ends a run after too many in a row."""

from __future__ import annotations

from orchestration.run.directory import CAPTURED_STEPS, RunDirectory


class NonFiniteError(RuntimeError):
    """The error that ends a run in which too many updates in a row held an Inf or NaN."""


def not_finite_message(step: int, skipped_in_a_row: int, run: RunDirectory) -> str:
    """Return the message that ends the run: what happened, which checkpoint is from before it, how to look into it."""
    return (
        f"step {step}: {skipped_in_a_row} updates in a row had an Inf or NaN in an advantage, loss or gradient "
        "and were skipped (train.max_skipped_in_a_row). The policy as it was before them is in "
        f"{run.checkpoints()[-1]}. Look at the updates with: "
        f"python -m orchestration.step_debugger {run.path / CAPTURED_STEPS}"
    )


def skipped_warning(step: int, skipped_in_a_row: int, run: RunDirectory) -> str:
    """Return the warning that is shown after a step with a skipped update."""
    return (
        f"step {step}: an update held an Inf or NaN and was skipped ({skipped_in_a_row} in a row); it is kept in "
        f"{run.path / CAPTURED_STEPS}"
    )
