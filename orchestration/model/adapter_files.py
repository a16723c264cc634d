"""Save and read adapters in PEFT's format, with a note that names the base model they were trained on."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from configs.blocks.lora import Lora
from orchestration.model.lora import load_adapter, peft_config

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FOLDER = "adapter"  # beside a merged model: in its own folder transformers would apply the adapter once more
BASE = "base_model.json"  # our file beside PEFT's two; it names the weights that the adapter belongs to
BLOCKS, BLOCK_BYTES = 64, 4096
# These settings change an adapter's meaning and are not supported. Each stands with the value that means it is off.
UNSUPPORTED = {"use_dora": False, "rank_pattern": {}, "alpha_pattern": {}, "bias": "none", "modules_to_save": None,
               "fan_in_fan_out": False, "lora_bias": False}  # fmt: skip


@dataclass(frozen=True)
class Adapter:
    """An adapter that was read from disk."""

    tensors: dict[str, Tensor]  # by PEFT's names
    rank: int
    scale: float
    base_path: str
    base_fingerprint: str | None  # None when the program that saved the adapter noted none


def save_adapter(
    folder: Path, tensors: dict[str, Tensor], lora: Lora, base_path: str, base_name: str | None = None
) -> None:
    """Write a folder that `PeftModel.from_pretrained` reads. The target all-linear is kept as such.

    base_name: what the base model is called in it, as the user did: an absolute path is on no other machine.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    config = peft_config(lora, base_name or base_path)
    config.inference_mode = True
    config.save_pretrained(str(folder))
    note = {"path": base_name or base_path, "fingerprint": weights_fingerprint(base_path)}
    (folder / BASE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")


def read_adapter(folder: str | Path) -> Adapter:
    """Read an adapter folder, or the adapter beside a merged checkpoint.

    Raises:
        ValueError: the folder holds no adapter, or one that is not plain LoRA.
    """
    from safetensors.torch import load_file

    folder = Path(folder)
    if (folder / ADAPTER_FOLDER / CONFIG).is_file():
        folder = folder / ADAPTER_FOLDER
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} is no adapter in PEFT's format: it lacks {' and '.join(missing)}")
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{folder} holds a {config.get('peft_type')} adapter; only LORA is supported")
    for key, off in UNSUPPORTED.items():
        if config.get(key) not in (None, off):
            raise ValueError(
                f"{folder / CONFIG}: {key} is {config[key]!r}, which is not supported; merge the adapter with PEFT"
            )
    rank, alpha = config["r"], config["lora_alpha"]
    note = json.loads((folder / BASE).read_text(encoding="utf-8")) if (folder / BASE).is_file() else {}
    return Adapter(
        tensors=load_file(folder / WEIGHTS),
        rank=rank,
        scale=alpha / rank**0.5 if config.get("use_rslora") else alpha / rank,
        base_path=note.get("path") or config["base_model_name_or_path"],
        base_fingerprint=note.get("fingerprint"),
    )


def start_from(hf_model: Any, lora: Lora, base_path: str) -> None:
    """Copy the adapter that `lora.adapter` names, if any, into the model's adapters.

    Raises:
        ValueError: there is no such adapter, or it does not fit the model or the other settings.
    """
    adapter = check_start(lora, base_path)
    if adapter is not None:
        load_adapter(hf_model, adapter.tensors, str(lora.adapter))


def check_start(lora: Lora, base_path: str) -> Adapter | None:
    """Return the adapter that `lora.adapter` names, if any, checked against the settings and the base model's weights.

    Raises:
        ValueError: there is no such adapter, or its rank, scale or base model differs.
    """
    if lora.adapter is None:
        return None
    adapter = read_adapter(lora.adapter)
    if (adapter.rank, adapter.scale) != (lora.rank, lora.scale):
        raise ValueError(
            f"lora.adapter: {lora.adapter} has rank {adapter.rank} and scale {adapter.scale:g}, but the lora block has "
            f"rank {lora.rank} and scale {lora.scale:g}; set lora.rank, alpha and rank_stabilised as in its {CONFIG}"
        )
    check_base(adapter, base_path, lora.adapter)
    return adapter


def check_base(adapter: Adapter, base_path: str, source: str | Path) -> None:
    """Raise ValueError when the adapter was trained on other weights than those at `base_path`."""
    if adapter.base_fingerprint is None or weights_fingerprint(base_path) == adapter.base_fingerprint:
        return
    raise ValueError(
        f"{source} was trained on other weights than those of {base_path} (fingerprint {adapter.base_fingerprint}, not "
        f"{weights_fingerprint(base_path)}); give the model that was at {adapter.base_path} when it was trained"
    )


def weights_fingerprint(model_path: str) -> str:
    """Return 16 hexadecimal digits that identify a model's weight files.

    They are a hash of the files' names, their sizes and 64 blocks of 4 KiB spread over each.

    Raises:
        ValueError: there is no such folder, and no such model in the hub's local cache.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        from transformers.utils import cached_file

        try:
            folder = Path(cached_file(model_path, "config.json", local_files_only=True)).parent
        except OSError as error:
            raise ValueError(
                f"'{model_path}' is no folder, and as a hub name it is not in the local cache; give the folder of the "
                "base model"
            ) from error
    digest = hashlib.sha256()
    for file in sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            for block in range(BLOCKS):
                stream.seek(block * max(size - BLOCK_BYTES, 0) // (BLOCKS - 1), os.SEEK_SET)
                digest.update(stream.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]
