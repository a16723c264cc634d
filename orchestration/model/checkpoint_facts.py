"""Look into a model path without loading weights: what it is, how large it is, and whether it is complete."""

from __future__ import annotations

import json
import math
import struct
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.blocks.rl import Model
from orchestration.model.plain_config import plain_config
from orchestration.model.rotary import rotary_kinds
from plugins.nearest import nearest

HUB_TIMEOUT_SECONDS = 5
MADE_BY = {"SmolLM2-135M-Instruct": "data_prep.smollm2", "tiny-sorter": "data_prep.tiny_sorter_model"}
# The last of these class names belongs to language models that see images.
GENERATIVE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@dataclass(frozen=True)
class ModelFacts:
    """The sizes of a causal language model, read from its config.json and the headers of its weight files."""

    path: str
    architecture: str
    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_positions: int | None  # None when the model states no limit
    rotary: frozenset[str] = frozenset()  # kinds of rotary embedding
    noise: str = ""  # what its config.json asks for in training, and training here does without

    @property
    def kv_values_per_token(self) -> int:
        """Return how many numbers, in keys and values, one token leaves in the key-value cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def model_facts(model: Model) -> ModelFacts:
    """Return the sizes of the configured model.

    Raises:
        ValueError: there is no such model, it is incomplete, or it is no causal language model.
    """
    folder = find_model(model.path)
    config: Any = plain_config(folder) if folder is not None and any(folder.glob("*.safetensors")) else None
    if config is None:
        config = _config_by_transformers(model, str(folder or model.path))
    architectures = config.architectures or []
    if not (isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)):
        raise ValueError(f"model.path: {model.path}: its config.json has architectures {architectures!r}; give a list")
    if config.is_encoder_decoder or (architectures and not any(a.endswith(GENERATIVE) for a in architectures)):
        raise ValueError(
            f"model.path: {model.path} is a {architectures[0] if architectures else config.model_type}, which is no "
            "causal language model; give a model that generates text"
        )
    try:
        facts = _facts(model.path, folder, config, architectures)
    except (ArithmeticError, AttributeError, TypeError) as error:
        raise ValueError(f"model.path: {model.path}: its config.json makes no model: {_first_line(error)}") from error
    for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocabulary"):
        if not (isinstance(value := getattr(facts, name), int) and value > 0):
            raise ValueError(f"model.path: {model.path}: its config.json makes no model: {name} is {value!r}")
    return facts


def _facts(path: str, folder: Path | None, config: Any, architectures: list[str]) -> ModelFacts:
    text = config.get_text_config()
    return ModelFacts(
        path=path,
        architecture=architectures[0] if architectures else config.model_type,
        parameters=_parameters(folder, config),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        vocabulary=text.vocab_size,
        max_positions=getattr(text, "max_position_embeddings", None),
        rotary=frozenset(rotary_kinds(text)),
        noise=", ".join(f"{key} {value:g}" for key, value in training_noise(text).items()),
    )


def training_noise(config: Any) -> dict[str, float]:
    """Return the values of a configuration that make two training passes differ: dropout, and noise in a router."""
    return {
        key: value
        for key, value in vars(config).items()
        if ("dropout" in key or key.endswith(("_pdrop", "layerdrop", "jitter_noise")))
        and not key.startswith(("classifier", "summary"))  # heads that a language model does not have
        and isinstance(value, int | float)
        and value > 0
    }


def _config_by_transformers(model: Model, path: str) -> Any:
    from transformers import AutoConfig  # late: seconds

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # a config.json with wrong values raises anything
        raise ValueError(
            f"model.path: {model.path}: transformers does not understand its config.json: {_first_line(error)}"
        ) from error


def find_model(path: str) -> Path | None:
    """Return the complete folder that a model path means, or None when it is a hub name that is still to be fetched.

    Raises:
        ValueError: the path is neither a complete folder nor a model on a hub that can be reached.
    """
    folder = Path(path)
    if folder.is_dir():
        check_folder(folder)
        return folder
    if folder.is_file():
        raise ValueError(f"model.path: {path} is a file; give the folder that holds config.json")
    if _looks_local(path):
        raise ValueError(f"model.path: there is no folder {path}{_way_out(path)}")
    return _hub_model(path)


def _looks_local(path: str) -> bool:
    """Return whether a path means a folder: it does unless it has the form `name` or `owner/name` of a hub name.

    `owner/name` means a folder too when the folder `owner` exists here.
    """
    owner, slash, _ = path.partition("/")
    return (
        path.startswith((".", "/", "~"))
        or path.count("/") > 1
        or (bool(slash) and (owner == "models" or Path(owner).is_dir()))
    )


def _way_out(path: str) -> str:
    folder = Path(path)
    if path.startswith("~") and folder.expanduser().is_dir():
        return f"; '~' is not expanded in YAML, write {folder.expanduser()}"
    if folder.name in MADE_BY:
        return f"; `python -m {MADE_BY[folder.name]}` makes it (so does `make`, see `make help`)"
    if near := _near_folder(folder):
        return f"; did you mean {near}?"
    return "; give a folder in Hugging Face format (config.json, *.safetensors, tokenizer) or a hub name (owner/name)"


def _near_folder(folder: Path) -> Path | None:
    siblings = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
    guess = nearest(folder.name, siblings)
    return folder.parent / guess if guess else None


def check_folder(folder: Path) -> None:
    """Raise ValueError unless the folder holds a config.json and complete weights."""
    names = sorted(p.name for p in folder.iterdir())
    contents = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"
    if "config.json" not in names:
        if "adapter_config.json" in names:
            raise ValueError(
                f"model.path: {folder} is a LoRA adapter; give its base model here and the adapter as lora.adapter, or "
                f"merge the two first: python -m orchestration.model.merge_adapter {folder} OUT"
            )
        raise ValueError(f"model.path: {folder} is no model folder: it has no config.json (it holds {contents})")
    if not any(name.endswith((".safetensors", ".bin")) for name in names):
        raise ValueError(f"model.path: {folder} has no weights (*.safetensors or *.bin; it holds {contents})")
    for index in folder.glob("*.index.json"):
        try:
            listed = set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values())
        except (ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"model.path: {index} is no index of weights: {error}; fetch the model again") from error
        if missing := sorted(listed - set(names)):
            raise ValueError(
                f"model.path: {folder} lacks {', '.join(missing[:3])}{' and more' if len(missing) > 3 else ''}, which "
                f"{index.name} names; fetch the model again"
            )
    for file in folder.glob("*.safetensors"):
        safetensors_shapes(file)


def safetensors_shapes(file: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor in a .safetensors file, by name, from the file's header.

    Raises:
        ValueError: the file is cut off, or it is no .safetensors file.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        header_bytes = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if header_bytes > size - 8:
            raise ValueError(f"model.path: {file} is no whole .safetensors file ({size} bytes); fetch or save it again")
        try:
            header: dict[str, Any] = json.loads(stream.read(header_bytes))
            header.pop("__metadata__", None)
            end = max((int(tensor["data_offsets"][1]) for tensor in header.values()), default=0)
            shapes = {name: list(map(int, tensor["shape"])) for name, tensor in header.items()}
        except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"model.path: {file} is no .safetensors file: {error}; fetch or save it again") from error
    if 8 + header_bytes + end > size:
        raise ValueError(
            f"model.path: {file} is cut off: {size} of {8 + header_bytes + end} bytes; fetch or save it again"
        )
    return shapes


def _parameters(folder: Path | None, config: Any) -> int:
    """Return the number of parameters; tied ones count once."""
    files = sorted(folder.glob("*.safetensors")) if folder else []
    if files:
        tensors = {name: shape for file in files for name, shape in safetensors_shapes(file).items()}
        tied = getattr(config, "tie_word_embeddings", False)
        return sum(math.prod(shape) for name, shape in tensors.items() if not (tied and name == "lm_head.weight"))
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


def _hub_model(name: str) -> Path | None:
    """Return a hub model's folder in the local cache; None when it is not there but the hub has it.

    Raises:
        ValueError: the model is not in the cache, and the hub does not have it or cannot be reached.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError, build_hf_headers

    near = _near_folder(Path(name))
    otherwise = "or give a folder in Hugging Face format" + (f" (did you mean {near}?)" if near else "")
    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError as error:
        raise ValueError(f"model.path: '{name}' is neither a folder nor a hub name (owner/name)") from error
    if isinstance(cached, str):
        check_folder(Path(cached).parent)
        return Path(cached).parent
    if constants.HF_HUB_OFFLINE:
        raise ValueError(
            f"model.path: there is no folder '{name}', and as a hub name it is not in the local cache while "
            f"HF_HUB_OFFLINE is set; fetch it first (hf download {name}), {otherwise}"
        )
    url = f"{constants.ENDPOINT}/{name}/resolve/main/config.json"
    request = urllib.request.Request(url, method="HEAD", headers=build_hf_headers())
    try:
        urllib.request.urlopen(request, timeout=HUB_TIMEOUT_SECONDS).close()
    except urllib.error.HTTPError as error:
        raise ValueError(
            f"model.path: there is no folder '{name}', and {constants.ENDPOINT} refuses it as a hub name (HTTP "
            f"{error.code}): check the spelling, set HF_TOKEN for a gated model, {otherwise}"
        ) from error
    except OSError as error:  # URLError and time-outs are OSErrors
        raise ValueError(
            f"model.path: there is no folder '{name}', and as a hub name it is not in the local cache and "
            f"{constants.ENDPOINT} cannot be reached ({getattr(error, 'reason', error)}); fetch it where there is a "
            f"network (hf download {name}), {otherwise}"
        ) from error
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n", 1)[0]
