"""LoRA with PEFT: put adapters into a model, switch them off for a moment, read them out and merge them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from configs.blocks.lora import Lora
from configs.blocks.rl import Model
from plugins.nearest import nearest

NAME = "default"  # PEFT's name for a model's only adapter
PREFIX = "base_model.model."  # every name in PEFT's files begins with it

Whole = Callable[[list[nn.Parameter]], AbstractContextManager[Any]]  # in this context, partitioned parameters are whole


@dataclass(frozen=True)
class AdapterSize:
    """The size of a model's adapter."""

    parameters: int
    matrices: int  # linear layers that have an adapter


def everything_is_whole(_: list[nn.Parameter]) -> AbstractContextManager[Any]:
    """Return a context that does nothing, for models whose parameters are not partitioned."""
    return nullcontext()


def add_adapters(hf_model: Any, lora: Lora) -> None:
    """Put fresh float32 adapters into a Hugging Face model, in place. Only they are trainable afterwards.

    Raises:
        ValueError: a target module does not exist, is no linear layer or is the language-model head.
    """
    ours = {id(p) for layer in _injected(hf_model, lora, targeted(hf_model, lora)).values() for p in factors(layer)}
    for parameter in hf_model.parameters():
        parameter.requires_grad_(id(parameter) in ours)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _injected(hf_model: Any, lora: Lora, targets: list[str]) -> dict[str, Any]:
    """Let PEFT put fresh adapters into a model, and return the layers that have them, by name.

    Raises:
        ValueError: PEFT takes others than `targets`: it adapts experts, which are no linear layers, in its own way.
    """
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lora.seed)  # every rank makes the same adapters
        inject_adapter_in_model(peft_config(lora), hf_model)
    layers = dict(adapted(hf_model))
    if sorted(layers) != targets:
        works = ", ".join(sorted({name.rpartition(".")[2] for name in layers.keys() & set(targets)}))
        raise ValueError(
            f"lora.target_modules: in {type(hf_model).__name__} some of these are mixtures of experts, which cannot have "
            f"adapters here; use {f'[{works}]' if works else 'the modules of its attention'}"
        )
    return layers


def peft_config(lora: Lora, base_model: str | None = None) -> Any:
    """Return PEFT's configuration for this block of ours."""
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.rank_stabilised,
        target_modules=lora.target_modules,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_model,
    )


def targeted(hf_model: Any, lora: Lora) -> list[str]:
    """Return the names of the linear layers that get an adapter, sorted.

    Raises:
        ValueError: a target module does not exist, is no linear layer or is the language-model head.
    """
    head = hf_model.get_output_embeddings()
    modules = {name: module for name, module in hf_model.named_modules() if name}
    linear = {name for name, module in modules.items() if isinstance(module, nn.Linear) and module is not head}
    if not linear:
        raise ValueError(
            f"lora: {type(hf_model).__name__} has no linear layers beside its head (gpt2's are Conv1D), so none can have "
            "an adapter here; leave out the block lora, or take another model"
        )
    if lora.target_modules == "all-linear":
        return sorted(linear)
    names: set[str] = set()
    for target in lora.target_modules:
        matches = {name for name in modules if name == target or name.endswith(f".{target}")}
        possible = sorted({name.rpartition(".")[2] for name in linear})
        if not matches:
            near = nearest(target, possible)
            raise ValueError(
                f"lora.target_modules: {type(hf_model).__name__} has no module '{target}'"
                f"{f'; did you mean {near}?' if near else ''} (it has {', '.join(possible)})"
            )
        if matches - linear:
            what = "the language-model head" if modules[min(matches - linear)] is head else "no linear layer"
            raise ValueError(
                f"lora.target_modules: '{target}' is {what} in {type(hf_model).__name__}, which cannot have an adapter "
                f"here; use {', '.join(possible)}, or all-linear"
            )
        names |= matches
    return sorted(names)


def adapter_size(model: Model, lora: Lora) -> AdapterSize:
    """Return the size of the configured model's adapter, without loading weights.

    Raises:
        ValueError: a target module does not exist, is no linear layer or is the language-model head.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    with torch.device("meta"):
        hf_model = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
        layers = _injected(hf_model, lora, targeted(hf_model, lora))
    return AdapterSize(sum(p.numel() for layer in layers.values() for p in factors(layer)), len(layers))


def adapted(hf_model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers that have an adapter, each with the name that it has without one."""
    from peft.tuners.lora import LoraLayer

    return ((name, module) for name, module in hf_model.named_modules() if isinstance(module, LoraLayer))


def factors(layer: Any) -> list[nn.Parameter]:
    """Return A [rank, in] and B [out, rank] of an adapted layer."""
    return [layer.lora_A[NAME].weight, layer.lora_B[NAME].weight]


@contextmanager
def adapters_off(hf_model: nn.Module) -> Iterator[None]:
    """Switch the adapters off during the block, so that the model computes what its base model does.

    PEFT's own switch also makes adapters untrainable, which breaks an optimizer that has hooks on them.
    """
    layers = [layer for _, layer in adapted(hf_model)]
    assert layers, "the model has no adapters"
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapter_tensors(hf_model: nn.Module, whole: Whole = everything_is_whole) -> Iterator[tuple[str, Tensor]]:
    """Yield every A and B with its PEFT name. With partitioned parameters every rank must iterate (a collective)."""
    for name, layer in adapted(hf_model):
        a, b = factors(layer)
        with whole([a, b]):
            yield f"{PREFIX}{name}.lora_A.weight", a.detach()
            yield f"{PREFIX}{name}.lora_B.weight", b.detach()


def adapter_description(hf_model: nn.Module, lora: Lora) -> dict[str, Any]:
    """Return what an engine must know before an adapter's tensors arrive: PEFT's settings, the number of matrices."""
    matrices = sum(1 for _ in adapted(hf_model))
    targets = lora.target_modules
    return {
        "r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rank_stabilised, "target_modules": targets,
        "matrices": matrices,
    }  # fmt: skip


def merged_tensors(hf_model: nn.Module, whole: Whole = everything_is_whole) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters with adapters merged in, under the names of the base model; the model itself stays as it is.

    Every merge starts from the unchanged base, so rounding does not add up from one merge to the next. With partitioned
    parameters every rank must iterate (a collective).
    """
    layers = dict(adapted(hf_model))
    for name, parameter in hf_model.named_parameters():
        owner, _, own_name = name.rpartition(".base_layer.")
        layer = layers.get(owner) if own_name == "weight" else None
        if layer is not None:
            a, b = factors(layer)
            with whole([parameter, a, b]):
                yield f"{owner}.weight", merged(parameter.detach(), a, b, layer.scaling[NAME])
        elif not any(part in ("lora_A", "lora_B") for part in name.split(".")):
            with whole([parameter]):
                yield name.replace(".base_layer.", "."), parameter.detach()


def merged(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return base + scale * b @ a, [out, in], computed in float32 and rounded once, to the type of `base`."""
    return (base.float() + scale * (b.detach().float() @ a.detach().float())).to(base.dtype)


def load_adapter(hf_model: nn.Module, tensors: dict[str, Tensor], source: str) -> None:
    """Copy an adapter's tensors, given by PEFT's names, into the adapters of a model.

    Raises:
        ValueError: their names or shapes differ from those of the model's adapters.
    """
    own = dict(adapter_tensors(hf_model))
    differing = sorted(own.keys() ^ tensors.keys())
    differing = differing or [name for name, tensor in own.items() if tensor.shape != tensors[name].shape]
    if differing:
        raise ValueError(
            f"lora.adapter: {source} does not fit this model with lora.rank and lora.target_modules: {differing[0]} "
            "differs; set both as in its adapter_config.json"
        )
    for name, tensor in own.items():
        tensor.copy_(tensors[name])
