"""In vLLM's workers, check the policy's adapter and put it beside the base model, which stays as it was loaded.

Every request of an engine with adapters uses this one, from the engine's start (an adapter of zeros) to its end.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rollouts.vllm import internals
from rollouts.vllm.resident_weights import Comparing

ADAPTER_ID = 1
FACTORS = (".lora_A.weight", ".lora_B.weight")


def adapter_request() -> Any:
    """Return the adapter that requests name. Its path is only read when the adapter is missing, which is an error."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", ADAPTER_ID, "the-adapter-of-the-policy-was-lost")


def adapter_arguments(rank: int) -> dict[str, Any]:
    """Return vLLM's engine arguments for one adapter of this rank; it has buffers for certain ranks only."""
    room = min(one for one in internals.adapter_ranks() if one >= rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}


def checked_adapter(model: nn.Module, tensors: dict[str, Tensor], config: dict[str, Any]) -> Any:
    """Return the adapter made of tensors with PEFT's names, as vLLM holds one. It may keep the tensors.

    config: r, lora_alpha, use_rslora and target_modules as in PEFT's adapter_config.json; matrices: how many layers
    have one.

    Raises ValueError when the engine has no room for adapters, factors are missing or of another rank, or the model has
    no such layer. vLLM itself would leave out what it does not know.
    """
    if not internals.takes_adapters(model):
        raise ValueError("an adapter came to an engine that was started without lora_rank")
    layers = {name.removesuffix(FACTORS[0]) for name in tensors if name.endswith(FACTORS[0])}
    if len(layers) != config["matrices"] or tensors.keys() != {f"{layer}{f}" for layer in layers for f in FACTORS}:
        raise ValueError(
            f"{len(tensors)} tensors came, which are not an A and a B for each of {config['matrices']} layers"
        )
    for layer in layers:
        a, b = (tensors[f"{layer}{factor}"] for factor in FACTORS)
        if not a.shape[0] == b.shape[1] == config["r"]:
            raise ValueError(f"{layer}: A {list(a.shape)} and B {list(b.shape)} are not of rank {config['r']}")
    adapter = internals.made_adapter(model, ADAPTER_ID, tensors, config)
    if unknown := internals.unknown_parts(model, adapter):
        raise ValueError(f"{type(model).__name__} has no layer for {len(unknown)} parts of the adapter: {unknown[0]}")
    return adapter


def differing_factors(model: nn.Module, tensors: dict[str, Tensor], config: dict[str, Any]) -> list[str]:
    """Return a sentence when the layers do not hold this adapter: it is put in once more, but compared, not copied."""
    again = internals.made_adapter(model, ADAPTER_ID, {name: one.clone() for name, one in tensors.items()}, config)
    with Comparing() as compared:
        internals.replace_adapter(model, again)
    missing = len(tensors) - compared.copies + compared.differing
    return [f"the adapter ({missing} of {len(tensors)} factors)"] if missing else []


def one_adapter_product(
    self: Any,  # vLLM's bookkeeping of a batch
    y: Tensor,  # [T, out], added to in place
    x: Tensor,  # [T, in]
    lora_a_stacked: tuple[Tensor, ...],  # [1, 1, rank, in] per slice of the output
    lora_b_stacked: tuple[Tensor, ...],  # [1, 1, slice, rank]; scaled already
    scale: float,
    output_slices: tuple[int, ...],
    **_: Any,
) -> None:
    """Add scale B (A x) to y, for one adapter that all tokens use: two matrix products.

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
    self: Any,  # vLLM's bookkeeping of a batch
    y: Tensor,  # [T, vocabulary], added to in place
    x: Tensor,  # [T, in]
    lora_a_stacked: Tensor,  # [1, 1, rank, in]; zeros when the head has no adapter
    lora_b_stacked: Tensor,  # [1, 1, vocabulary, rank]
    scale: float,
    **_: Any,
) -> None:
    """Do the same for the head. vLLM's own CPU function knows the adapters of sampled tokens only, and fails on a
    prompt whose log-probabilities are requested."""
    a, b = lora_a_stacked[0, 0], lora_b_stacked[0, 0, : y.shape[-1]]
    if not self.no_lora and a.any():
        y[:, : len(b)] += scale * ((x @ a.T) @ b.T)


internals.replace_cpu_adapter_products(one_adapter_product, one_adapter_logits)
