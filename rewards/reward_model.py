"""Reward responses by the score of a trained reward model.

`python main_sl.py --config configs/reward_model.yaml` trains one.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from records.rollout import Trajectory


def reward_model(trajectory: Trajectory, path: str, mean: float = 0.0, scale: float = 1.0) -> float:
    """Return scale * (score - mean), with the score that a one-label sequence classification model gives the exchange.

    The model reads the policy's own tokens, prompt and response as they were sampled. It must therefore have the
    policy's tokenizer, as a model trained from the same base has. It runs on the CPU of the scoring process, in
    float32. Scores have no zero of their own, only their differences matter; `mean` and `scale` are for mixing with
    other parts.

    Raises:
        ValueError: there is no such model in the folder, or it knows fewer tokens than the policy used.
    """
    model = _loaded(path)
    ids = np.concatenate([trajectory.prompt_ids, trajectory.token_ids]).astype(np.int64)
    vocabulary = model.get_input_embeddings().num_embeddings
    if ids.max() >= vocabulary:
        raise ValueError(
            f"reward_model: '{path}' has {vocabulary} tokens, but the policy wrote token {ids.max()}; use a reward "
            "model with the policy's tokenizer"
        )
    import torch

    with torch.inference_mode():
        return scale * (float(model(torch.from_numpy(ids)[None], use_cache=False).logits[0, 0]) - mean)


@functools.lru_cache(maxsize=4)
def _loaded(path: str) -> Any:
    """Load the model once per scoring process. transformers is imported here, so that other rewards start fast."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"reward_model: '{path}' holds no model: {str(error).splitlines()[0]}; correct params.path"
        ) from error
    architectures = config.architectures or []
    if config.num_labels != 1 or not any(name.endswith("ForSequenceClassification") for name in architectures):
        raise ValueError(
            f"reward_model: '{path}' is a {', '.join(architectures) or 'model'} of {config.num_labels} labels, not a "
            "sequence classification model of one; train one with main_sl.py and algorithm.name: reward_model"
        )
    import torch

    return AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
