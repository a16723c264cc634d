"""Reward responses that are exactly the expected answer and nothing else."""

from __future__ import annotations

from records.rollout import Trajectory


def exact_match(trajectory: Trajectory, ignore_case: bool = False) -> float:
    """Return 1 when the response equals the answer after outer white space is removed, else 0.

    Raises:
        ValueError: the prompt has no answer.
    """
    answer = trajectory.prompt.answer
    if answer is None:
        raise ValueError(
            f"prompt {trajectory.prompt.prompt_id} has no answer to compare with; set data.sources[].answer_column"
        )
    given, expected = trajectory.response.strip(), str(answer).strip()
    if ignore_case:
        given, expected = given.casefold(), expected.casefold()
    return float(given == expected)
