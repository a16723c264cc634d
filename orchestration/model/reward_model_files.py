"""A trained reward model on disk: transformers' sequence classification format with one label, the score."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor


def save_reward_model(folder: Path, hf_model: Any, weights: dict[str, Tensor], head: dict[str, Tensor]) -> None:
    """Write what AutoModelForSequenceClassification loads: the trunk and the value head as `score`.

    weights: the causal model's by name; head: weight [H] and bias [1] of the value head. The bias has no place in that
    format and is left out: it moves all scores alike. The score of a text is that of its last token;
    transformers finds it by looking for the padding token, so that this must not be the end token: it is left unset, and
    texts are scored one at a time.

    Raises: ValueError when transformers has no such class for the model's family.
    """
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(hf_model.config)
    if type(config) not in AutoModelForSequenceClassification._model_mapping:
        raise ValueError(
            f"{type(hf_model).__name__} has no sequence classification twin in transformers to be saved as"
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
