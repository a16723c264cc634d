"""Write a base model and its adapter as one model: python -m orchestration.model.merge_adapter ADAPTER OUT"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from orchestration.model.adapter_files import Adapter, check_base, read_adapter
from orchestration.model.lora import PREFIX, merged


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m orchestration.model.merge_adapter",
        description="Write a base model and its adapter as one model in Hugging Face format.",
    )
    parser.add_argument("adapter", help="folder of the adapter, e.g. runs/grpo/checkpoints/step_000100")
    parser.add_argument("out", help="folder to write; must not exist or be empty")
    parser.add_argument("--base", help="the base model, where it is elsewhere than when the adapter was trained")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="type of the weights; default: the base's own")
    options = parser.parse_args(arguments)
    try:
        print(merge_adapter(options.adapter, options.out, options.base, options.dtype))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def merge_adapter(adapter_path: str, out: str, base: str | None = None, dtype: str | None = None) -> str:
    """Write base model and adapter as one model folder with its tokenizer; return the message for the user.

    Raises:
        ValueError: there is no adapter, the base model is missing or another one, or `out` is not empty.
    """
    from transformers import AutoModelForCausalLM

    from data_feeds.chat.template import load_tokenizer

    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{out} exists and is not empty; choose another folder")
    adapter = read_adapter(adapter_path)
    base = base or adapter.base_path
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype or "auto")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the adapter's base model '{base}' cannot be loaded ({error}); give its folder with --base"
        ) from error
    check_base(adapter, base, adapter_path)
    rounding, update = merge_into(model, adapter)
    model.save_pretrained(target)
    load_tokenizer(base, False).save_pretrained(target)
    dtype_name = str(next(model.parameters()).dtype).removeprefix("torch.")
    message = (
        f"wrote {target}: {base} with {adapter_path} merged into {len(adapter.tensors) // 2} matrices, {dtype_name}"
    )
    share = (rounding / update) ** 0.5 if update else 0.0
    if share > 0.01:
        message += (
            f"\nrounding to {dtype_name} changed the update by {share:.0%} of its size; --dtype float32 keeps it whole"
        )
    return message


@torch.no_grad()
def merge_into(model: Any, adapter: Adapter) -> tuple[float, float]:
    """Merge the adapter into the model in place; return the squared norms of the rounding and of the whole update.

    Raises:
        ValueError: the adapter names a matrix that the model does not have.
    """
    weights = dict(model.named_parameters())
    rounding_square = update_square = 0.0
    for name, a in adapter.tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        matrix = name.removeprefix(PREFIX).removesuffix(".lora_A.weight") + ".weight"
        if matrix not in weights:
            raise ValueError(
                f"the adapter has a part for {matrix}, which {type(model).__name__} does not have; give its base model "
                "with --base"
            )
        b, weight = adapter.tensors[name.replace("lora_A", "lora_B")], weights[matrix]
        update = adapter.scale * (b.float() @ a.float())
        result = merged(weight, a, b, adapter.scale)
        rounding_square += float((result.float() - weight.float() - update).double().square().sum())
        update_square += float(update.double().square().sum())
        weight.copy_(result)
    return rounding_square, update_square


if __name__ == "__main__":
    raise SystemExit(main())
