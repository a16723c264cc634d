"""Paid for giving exactly the expected answer and nothing else."""

from __future__ import annotations

from records.rollout import Trajectory


def exact_match(trajectory: Trajectory, ignore_case: bool = False) -> float:
    """1 when the response equals the answer after outer white space is removed, else 0.

    Raises ValueError when the prompt has no answer.
    """
    answer = trajectory.prompt.answer
    if answer is None:
        raise ValueError(f"prompt {trajectory.prompt.prompt_id} has no answer to compare with")
    given, wanted = trajectory.response.strip(), str(answer).strip()
    if ignore_case:
        given, wanted = given.casefold(), wanted.casefold()
    return float(given == wanted)
