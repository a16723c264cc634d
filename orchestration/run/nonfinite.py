"""What becomes of a run in which too many updates in a row held an Inf or NaN."""

from __future__ import annotations

from orchestration.run.directory import CAPTURED_STEPS, RunDirectory, checkpoints


class NonFiniteError(RuntimeError):
    """Too many updates in a row held an Inf or NaN."""


def not_finite_message(step: int, skipped_in_a_row: int, run: RunDirectory) -> str:
    """What happened, which checkpoint is from before it, and how to look into it."""
    return (
        f"step {step}: {skipped_in_a_row} updates in a row had an Inf or NaN in a reward, advantage, loss or gradient and were "
        f"skipped (train.max_skipped_in_a_row). The policy is as it was before them: {checkpoints(run.path)[-1]}. Look at "
        f"the updates with: python -m orchestration.step_debugger {run.path / CAPTURED_STEPS}"
    )


def skipped_warning(step: int, skipped_in_a_row: int, run: RunDirectory) -> str:
    """Said aloud after each skipped update."""
    return (
        f"step {step}: an update held an Inf or NaN and was skipped ({skipped_in_a_row} in a row); it is kept in "
        f"{run.path / CAPTURED_STEPS}"
    )
