"""Read the config.json of a common kind of model without transformers, whose import takes several seconds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
)  # fmt: skip
# Every key that is understood here, with the types that transformers accepts for it. A file with any other key or type is
# left to transformers, which either knows it or says what is wrong.
KEYS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(SIZES, (int,)),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "pad_token_id", "bos_token_id", "pretraining_tp"), (int, type(None))),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "use_cache"), (bool,)),
    **dict.fromkeys(("hidden_act", "_name_or_path", "_model_name_or_path", "model_type", "dtype"), (str,)),
    **dict.fromkeys(("initializer_range", "rms_norm_eps"), (float,)),
    "attention_dropout": (int, float),
    "eos_token_id": (int, type(None)),
    "unk_token_id": (int,),
    "transformers_version": (str,),
    "architectures": (list,),
    "rope_parameters": (dict,),
}  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class PlainConfig:
    """What is asked of a transformers configuration, for a model of type llama."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None
    head_dim: int | None
    tie_word_embeddings: bool
    architectures: list[str]
    model_type: str = "llama"
    is_encoder_decoder: bool = False

    def get_text_config(self) -> PlainConfig:
        """Return the part that describes the language model: all of it."""
        return self


def plain_config(folder: Path) -> PlainConfig | None:
    """Return the configuration of a model folder, or None where only transformers understands it."""
    try:
        given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(given, dict) or given.get("model_type") != "llama" or not _is_understood(given):
        return None
    return PlainConfig(
        **{key: given[key] for key in SIZES},
        num_key_value_heads=given.get("num_key_value_heads"),
        head_dim=given.get("head_dim"),
        tie_word_embeddings=given.get("tie_word_embeddings", False),
        architectures=given["architectures"],
    )


def _is_understood(given: dict[str, Any]) -> bool:
    if not all(key in given for key in (*SIZES, "architectures", "rope_parameters")):
        return False
    if not all(key in KEYS and type(value) in KEYS[key] for key, value in given.items()):
        return False
    rope = given["rope_parameters"]
    return (
        all(given[key] > 0 for key in SIZES)
        and given["hidden_size"] % given["num_attention_heads"] == 0
        and all(isinstance(name, str) for name in given["architectures"])
        and given.get("dtype", "float32") in DTYPES
        and 0 <= given.get("initializer_range", 0.0) <= 1
        and rope.keys() == {"rope_theta", "rope_type"}
        and rope["rope_type"] == "default"
        and isinstance(rope["rope_theta"], float)
    )
