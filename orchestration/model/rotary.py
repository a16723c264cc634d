"""Rotary embeddings whose frequencies depend on the longest sequence of a pass: one choice for a whole job."""

from __future__ import annotations

from collections.abc import Set
from typing import Any


def rotary_kinds(config: Any) -> set[str]:
    """Return the kinds of rotary embedding that a model's configuration names, which may differ from layer to layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = all(isinstance(value, dict) for value in parameters.values())
    return {each.get("rope_type", "default") for each in (parameters.values() if by_layer else [parameters])}


def refuse_dynamic(kinds: Set[str], path: str) -> None:
    """Raise ValueError for a rotary embedding that changes with the length of the longest sequence in a pass."""
    if "dynamic" in kinds:
        raise ValueError(
            f"model.path: {path} has rope_type dynamic: log-probabilities then depend on the longest sequence of a "
            "pass, here and in vLLM differently; put linear, yarn or llama3 into its config.json, or take another model"
        )


def pin_rotary(hf_model: Any, longest: int) -> None:
    """Give every pass the frequencies of the job's longest sequence, in tokens, as vLLM does with max_model_len.

    transformers takes those of the longest sequence in a pass, and so of what happens to be packed together.
    Raise ValueError when they differ from layer to layer.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in hf_model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict) and "longrope" in kind.values():
            raise ValueError(f"{type(hf_model).__name__} has longrope in some layers only, which is not supported")
        if kind == "longrope":
            module.inv_freq = ROPE_INIT_FUNCTIONS[kind](module.config, seq_len=longest)[0]
            module.rope_type = "pinned"  # transformers replaces the frequencies of "longrope" in each pass
