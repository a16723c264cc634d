"""Paid when the response has the form that was asked for."""

from __future__ import annotations

import re

from rewards.find import checked_by
from rollouts.records import Trajectory


def _is_an_expression(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"params.pattern: {pattern!r} is no regular expression: {error}") from error


@checked_by(_is_an_expression)
def format_match(trajectory: Trajectory, pattern: str) -> float:
    """1 when the regular expression matches the whole response, from its first character to its last, else 0.

    A dot also matches a line break, so that `<think>.+</think>.+` spans lines.
    """
    return float(re.fullmatch(pattern, trajectory.response, re.DOTALL) is not None)
