"""Read the config.json of a common kind of model without transformers, whose import takes several seconds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
)  # fmt: skip
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "pad_token_id", "bos_token_id", "pretraining_tp")
# These keys are understood here, each with the types that transformers accepts for it. A file with any other key or
# type is left to transformers, which either knows it or says what is wrong.
KEYS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(SIZES, (int,)),
    **dict.fromkeys(OPTIONAL_SIZES, (int, type(None))),
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
    """The fields of a transformers configuration that we use, for a model of type llama."""

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
        """Return the part that describes the language model, which is the whole configuration."""
        return self


def plain_config(folder: Path) -> PlainConfig | None:
    """Return the configuration of a model folder, or None where only transformers understands it."""
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(raw, dict) or raw.get("model_type") != "llama" or not _is_understood(raw):
        return None
    return PlainConfig(
        **{key: raw[key] for key in SIZES},
        num_key_value_heads=raw.get("num_key_value_heads"),
        head_dim=raw.get("head_dim"),
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        architectures=raw["architectures"],
    )


def _is_understood(raw: dict[str, Any]) -> bool:
    if not all(key in raw for key in (*SIZES, "architectures", "rope_parameters")):
        return False
    if not all(key in KEYS and type(value) in KEYS[key] for key, value in raw.items()):
        return False
    rope = raw["rope_parameters"]
    return (
        all(raw[key] > 0 for key in SIZES)
        and raw.get("attention_dropout", 0) == 0
        and raw["hidden_size"] % raw["num_attention_heads"] == 0
        and all(isinstance(name, str) for name in raw["architectures"])
        and raw.get("dtype", "float32") in DTYPES
        and 0 <= raw.get("initializer_range", 0.0) <= 1
        and rope.keys() == {"rope_theta", "rope_type"}
        and rope["rope_type"] == "default"
        and isinstance(rope["rope_theta"], float)
    )
