"""A penalty on saying the same thing again."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from records.rollout import Trajectory


def repetition(
    trajectory: Trajectory, n: Annotated[int, Field(ge=1)] = 4, penalty: Annotated[float, Field(ge=0)] = 1.0
) -> float:
    """-penalty times the share of repeated n-grams: 1 - distinct / all, over runs of `n` generated tokens.

    0 for a response of fewer than n tokens. An n-gram lies within one turn.
    """
    ngrams: list[tuple[int, ...]] = []
    for turn in np.unique(trajectory.turn):
        tokens = trajectory.token_ids[trajectory.is_action & (trajectory.turn == turn)].tolist()
        ngrams += zip(*(tokens[start:] for start in range(n)), strict=False)
    if not ngrams:
        return 0.0
    return 0.0 - penalty * (1 - len(set(ngrams)) / len(ngrams))
