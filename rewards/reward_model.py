"""Paid what a trained reward model scores the response: `python main_sl.py --config configs/reward_model.yaml` makes one."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from records.rollout import Trajectory


def reward_model(trajectory: Trajectory, path: str, mean: float = 0.0, scale: float = 1.0) -> float:
    """scale * (score - mean), the score a sequence classification model of one label gives the whole exchange.

    The model reads the policy's own tokens, prompt and response as they were sampled, so it must have the policy's
    tokenizer, as a model trained from the same base has. It runs on the CPU of the scoring process, in float32. Scores
    have no zero of their own: differences within a group count, `mean` and `scale` are for mixing with other parts.

    Raises ValueError when there is no such model in the folder, or it knows fewer tokens than the policy used.
    """
    model = _loaded(path)
    ids = np.concatenate([trajectory.prompt_ids, trajectory.token_ids]).astype(np.int64)
    vocabulary = model.get_input_embeddings().num_embeddings
    if ids.max() >= vocabulary:
        raise ValueError(
            f"reward_model: '{path}' has {vocabulary} tokens, the policy wrote token {ids.max()}: another tokenizer"
        )
    import torch

    with torch.inference_mode():
        return scale * (float(model(torch.from_numpy(ids)[None], use_cache=False).logits[0, 0]) - mean)


@functools.lru_cache(maxsize=4)
def _loaded(path: str) -> Any:
    """Once per scoring process. transformers is imported here: other rewards start without it."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"reward_model: '{path}' holds no model: {str(error).splitlines()[0]}") from error
    named = config.architectures or []
    if config.num_labels != 1 or not any(name.endswith("ForSequenceClassification") for name in named):
        raise ValueError(
            f"reward_model: '{path}' is a {', '.join(named) or 'model'} of {config.num_labels} labels, not a sequence "
            "classification model of one; train one with main_sl.py and algorithm.name: reward_model"
        )
    import torch

    return AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
