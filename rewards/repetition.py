"""Penalise responses that repeat themselves."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from records.rollout import Trajectory


def repetition(
    trajectory: Trajectory, n: Annotated[int, Field(ge=1)] = 4, penalty: Annotated[float, Field(ge=0)] = 1.0
) -> float:
    """Return -penalty * (1 - distinct / all), where the n-grams are runs of `n` generated tokens within one turn.

    A response of fewer than n tokens gets 0.
    """
    ngrams: list[tuple[int, ...]] = []
    for turn in np.unique(trajectory.turn):
        tokens = trajectory.token_ids[trajectory.is_action & (trajectory.turn == turn)].tolist()
        ngrams += zip(*(tokens[start:] for start in range(n)), strict=False)
    if not ngrams:
        return 0.0
    return 0.0 - penalty * (1 - len(set(ngrams)) / len(ngrams))
