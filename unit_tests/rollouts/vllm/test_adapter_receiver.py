"""The product of one adapter on a CPU, against the formula and against vLLM's own function, which copies it per
token."""

from __future__ import annotations

import pytest
import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from rollouts.vllm.adapter_receiver import ADAPTER_ID, adapter_arguments, one_adapter_logits, one_adapter_product

RANK, ROOM, WIDTH, SLICES = 3, 8, 10, (4, 2, 2)  # a fused layer of three matrices; vLLM has room for rank 8


def stacked(dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A and B per slice as vLLM holds them: [1, 1, ...], zeros beyond the adapter's own rank."""
    generator = torch.Generator().manual_seed(0)
    a = [torch.zeros(1, 1, ROOM, WIDTH) for _ in SLICES]
    b = [torch.zeros(1, 1, size, ROOM) for size in SLICES]
    for one, other in zip(a, b, strict=True):
        one[0, 0, :RANK].normal_(generator=generator)
        other[0, 0, :, :RANK].normal_(generator=generator)
    return [t.to(dtype) for t in a], [t.to(dtype) for t in b]


def wrapper(adapters: list[int | None]) -> PunicaWrapperCPU:
    """vLLM's bookkeeping for a batch of one token per request: which adapter each uses."""
    made = PunicaWrapperCPU(16, max_batches=16, device="cpu")
    ids = tuple(0 if adapter is None else adapter for adapter in adapters)
    made.update_metadata(LoRAMapping(ids, ids, is_prefill=True), [ADAPTER_ID], 1, 64)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_adds_the_adapter_to_every_slice(dtype: torch.dtype) -> None:
    a, b = stacked(dtype)
    x, base = torch.randn(5, WIDTH).to(dtype), torch.randn(5, sum(SLICES)).to(dtype)
    here, y, theirs = wrapper([ADAPTER_ID] * 5), base.clone(), base.clone()
    here.add_lora_linear(y, x, tuple(a), tuple(b), 1.0, SLICES)
    deltas = [x.double() @ one[0, 0].double().T @ two[0, 0].double().T for one, two in zip(a, b, strict=True)]
    expected = base.double() + torch.cat(deltas, dim=1)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    buffer = tuple(torch.zeros(5, ROOM) for _ in SLICES)  # what vLLM's own function does
    here.add_shrink(buffer, x, tuple(a), 1.0)
    here.add_expand(theirs, buffer, tuple(b), SLICES)
    torch.testing.assert_close(y, theirs, rtol=tolerance, atol=tolerance)


def test_without_an_adapter_it_adds_nothing() -> None:
    a, b = stacked(torch.float32)
    y = torch.randn(4, sum(SLICES))
    before = y.clone()
    wrapper([None] * 4).add_lora_linear(y, torch.randn(4, WIDTH), tuple(a), tuple(b), 1.0, SLICES)
    assert torch.equal(y, before)


def test_it_is_what_vllm_calls_on_a_cpu() -> None:
    assert PunicaWrapperCPU.add_lora_linear is one_adapter_product


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (16, 16), (17, 32), (512, 512)])
def test_room_is_the_smallest_rank_vllm_has_buffers_for(rank: int, room: int) -> None:
    assert adapter_arguments(rank)["max_lora_rank"] == room


@pytest.mark.parametrize("padded", [0, 6])
def test_the_head_adds_its_adapter_to_every_token(padded: int) -> None:
    """Also to more tokens than are sampled: those of a prompt whose log-probabilities are asked."""
    torch.manual_seed(0)
    rank, width, vocabulary, tokens = 3, 8, 20, 11
    x, y = torch.randn(tokens, width), torch.randn(tokens, vocabulary)
    a, b = torch.randn(1, 1, rank, width), torch.randn(1, 1, vocabulary + padded, rank)
    wanted = y.double() + 0.5 * x.double() @ a[0, 0].double().T @ b[0, 0, :vocabulary].double().T
    punica = PunicaWrapperCPU(64, max_batches=4, device="cpu", max_loras=1)
    punica.no_lora = False
    punica.add_lora_logits(y, x, a, b, 0.5)
    assert PunicaWrapperCPU.add_lora_logits is one_adapter_logits
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
