"""Inside vLLM's workers: the policy's adapter is checked and put beside the base model, which stays as it was loaded.

Every request of an engine with adapters uses the one adapter, from its start (an adapter of zeros) to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from torch import Tensor, nn
from vllm.config.lora import MaxLoRARanks
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest

ADAPTER_ID = 1
FACTORS = (".lora_A.weight", ".lora_B.weight")


def adapter_request() -> LoRARequest:
    """What every request names. The path is only read when the adapter is missing, which is an error."""
    return LoRARequest("policy", ADAPTER_ID, "the-adapter-of-the-policy-was-lost")


def adapter_arguments(rank: int) -> dict[str, Any]:
    """vLLM's engine arguments for one adapter of this rank; it has buffers of certain ranks only."""
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": min(r for r in get_args(MaxLoRARanks) if r >= rank)}


def checked_adapter(model: nn.Module, named: Sequence[tuple[str, Tensor]], config: dict[str, Any]) -> LoRAModel:
    """The adapter made of tensors with PEFT's names, as vLLM holds one.

    config: r, lora_alpha, use_rslora and target_modules as in PEFT's adapter_config.json; matrices: how many layers have one.

    Raises:
        ValueError: the engine has no room for adapters, factors are missing or of another rank, or the model has no such
            layer. vLLM itself would leave out what it does not know.
    """
    manager = getattr(model, "lora_manager", None)
    if manager is None:
        raise ValueError("an adapter came to an engine that was started without lora_rank")
    tensors = dict(named)
    layers = {name.removesuffix(FACTORS[0]) for name in tensors if name.endswith(FACTORS[0])}
    if len(layers) != config["matrices"] or tensors.keys() != {f"{layer}{f}" for layer in layers for f in FACTORS}:
        raise ValueError(
            f"{len(tensors)} tensors came, which are not an A and a B for each of {config['matrices']} layers"
        )
    for layer in layers:
        a, b = (tensors[f"{layer}{factor}"] for factor in FACTORS)
        if not a.shape[0] == b.shape[1] == config["r"]:
            raise ValueError(f"{layer}: A {list(a.shape)} and B {list(b.shape)} are not of rank {config['r']}")
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    lora = LoRAModel.from_lora_tensors(
        lora_model_id=ADAPTER_ID,
        tensors={name: tensor.clone() for name, tensor in tensors.items()},  # the file they lie in is gone soon
        peft_helper=PEFTHelper.from_dict(config),
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    known = {part for name in manager.modules for part in manager.packed_modules.get(name, [name])}
    if unknown := sorted(lora.loras.keys() - known):
        raise ValueError(f"{type(model).__name__} has no layer for {len(unknown)} parts of the adapter: {unknown[0]}")
    return lora


def activate(model: nn.Module, lora: LoRAModel) -> None:
    """Put the adapter in the place of the one before."""
    manager: Any = model.lora_manager
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(lora)
    manager.activate_adapter(ADAPTER_ID)


def one_adapter_product(
    self: PunicaWrapperCPU,
    y: Tensor,  # [T, out], added to in place
    x: Tensor,  # [T, in]
    lora_a_stacked: tuple[Tensor, ...],  # [1, 1, rank, in] per slice of the output
    lora_b_stacked: tuple[Tensor, ...],  # [1, 1, slice, rank]; scaled already
    scale: float,
    output_slices: tuple[int, ...],
    **_: Any,
) -> None:
    """y += scale B (A x) for one adapter that all tokens use: two matrix products.

    vLLM's own CPU function gathers a copy of A and of B for every token first, gigabytes of them for a long prompt.
    """
    if self.no_lora:
        return
    offset = 0
    for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
        assert len(a) == len(b) == 1, "one adapter per engine"
        y[:, offset : offset + size] += scale * ((x @ a[0, 0].T) @ b[0, 0].T)
        offset += size


def one_adapter_logits(
    self: PunicaWrapperCPU,
    y: Tensor,  # [T, vocabulary], added to in place
    x: Tensor,  # [T, in]
    lora_a_stacked: Tensor,  # [1, 1, rank, in]; zeros when the head has no adapter
    lora_b_stacked: Tensor,  # [1, 1, vocabulary, rank]
    scale: float,
    **_: Any,
) -> None:
    """The same for the head. vLLM's own CPU function knows the adapters of sampled tokens only, and fails on a prompt whose
    log-probabilities are asked."""
    a, b = lora_a_stacked[0, 0], lora_b_stacked[0, 0, : y.shape[-1]]
    if not self.no_lora and a.any():
        y[:, : len(b)] += scale * ((x @ a.T) @ b.T)


PunicaWrapperCPU.add_lora_linear = one_adapter_product
PunicaWrapperCPU.add_lora_logits = one_adapter_logits
