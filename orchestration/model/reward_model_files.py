"""Save a trained reward model in transformers' sequence classification format, with one label: the score."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor


def save_reward_model(folder: Path, hf_model: Any, weights: dict[str, Tensor], head: dict[str, Tensor]) -> None:
    """Write a folder that AutoModelForSequenceClassification loads: the trunk, and the value head as `score`.

    The bias of the value head is left out, because the format has no place for it; it changes all scores alike. The
    score of a text is that of its last token, which transformers finds by looking for padding. Our padding token may be
    the end token, so the padding token is left unset, and texts must be scored one at a time.

    Args:
        weights: the causal model's tensors by name.
        head: `weight` [H] and `bias` [1] of the value head.

    Raises:
        ValueError: transformers has no such class for the model's family.
    """
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(hf_model.config)
    if type(config) not in AutoModelForSequenceClassification._model_mapping:
        raise ValueError(
            f"transformers has no sequence classification model for {type(hf_model).__name__}, so its reward model "
            "cannot be saved; use another model family"
        )
    config.architectures = [AutoModelForSequenceClassification._model_mapping[type(config)].__name__]
    config.num_labels = 1
    config.pad_token_id = None
    prefix = f"{hf_model.base_model_prefix}."
    state = {name: tensor.contiguous() for name, tensor in weights.items() if name.startswith(prefix)}
    state["score.weight"] = head["weight"][None].to(next(iter(state.values())).dtype).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
