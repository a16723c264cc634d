"""Chunked log-probabilities and entropy against float64 log_softmax, gradients included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from orchestration.model.chunked_logprobs import token_logprobs

U, V, H, N = 23, 97, 16, 40


def inputs(dtype: torch.dtype, bias: bool = False) -> tuple[list[Tensor], Tensor, Tensor]:
    """[hidden, weight(, bias)] as leaves, targets [N], rows [N]: unsorted, some rows several times, one row never."""
    torch.manual_seed(0)
    leaves = [torch.randn(U, H), torch.randn(V, H)] + [torch.randn(V)] * bias
    leaves = [leaf.to(dtype).requires_grad_() for leaf in leaves]
    rows = torch.cat([torch.arange(1, U), torch.randint(1, U, (N - U + 1,))])[torch.randperm(N)]
    targets = torch.randint(0, V, (N,))
    targets[rows == 5] = 3  # the same target of the same row, more than once
    return leaves, targets, rows


def reference(
    leaves: list[Tensor], targets: Tensor, rows: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Independent float64 values; the third entry holds float64 copies of the leaves, with gradients to come."""
    copies = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logits = copies[0] @ copies[1].T + (copies[2] if len(copies) == 3 else 0)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logp = torch.log_softmax(logits / temperature, dim=1)[rows]
    return logp[torch.arange(N), targets], -(logp.exp() * logp).sum(1), copies


@pytest.mark.parametrize("elements", [(1 << 26, 1 << 20), (7 * V, 3 * V), (4 * V, 4 * V), (1, 1)])
@pytest.mark.parametrize(("softcap", "bias"), [(None, False), (5.0, False), (None, True), (5.0, True)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("use", ["logprobs", "entropy", "both"])
def test_equals_float64(
    use: str, temperature: float, softcap: float | None, bias: bool, elements: tuple[int, int]
) -> None:
    leaves, targets, rows = inputs(torch.float32, bias)
    arguments = {"head_bias": leaves[2]} if bias else {}
    logprobs, entropy = token_logprobs(
        leaves[0], leaves[1], targets, temperature, rows=rows, softcap=softcap,
        chunk_elements=elements[0], block_elements=elements[1], **arguments,
    )  # fmt: skip
    assert logprobs.dtype == entropy.dtype == torch.float32
    expected_logprobs, expected_entropy, copies = reference(leaves, targets, rows, temperature, softcap)
    torch.testing.assert_close(logprobs.double(), expected_logprobs, atol=2e-5, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=2e-5, rtol=1e-6)
    factors = torch.randn(2, N)
    for one, other, factor, name in zip(
        (logprobs, entropy), (expected_logprobs, expected_entropy), factors, ("logprobs", "entropy"), strict=True
    ):
        if use in (name, "both"):
            (one * factor).sum().backward(retain_graph=True)
            (other * factor.double()).sum().backward(retain_graph=True)
    for leaf, copy in zip(leaves, copies, strict=True):
        torch.testing.assert_close(leaf.grad.double(), copy.grad, atol=1e-4, rtol=1e-4)


def test_without_rows_every_hidden_state_has_one_target() -> None:
    (hidden, weight), targets, _ = inputs(torch.float32)
    logprobs, entropy = token_logprobs(hidden, weight, targets[:U])
    logp = torch.log_softmax((hidden @ weight.T).double(), dim=1)
    torch.testing.assert_close(logprobs.double(), logp[torch.arange(U), targets[:U]], atol=1e-5, rtol=0)
    assert entropy.shape == (U,)


def test_bfloat16_rounds_only_the_matrix_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64 on the same rounded inputs: logits carry bfloat16 rounding (2^-8), the softmax none on top."""
    monkeypatch.setattr("orchestration.model.chunked_logprobs.SLICE_ROWS", 40)
    leaves, targets, rows = inputs(torch.bfloat16)
    logprobs, entropy = token_logprobs(*leaves, targets, 0.7, rows=rows, chunk_elements=7 * V, block_elements=3 * V)
    expected, expected_entropy, copies = reference(leaves, targets, rows, 0.7, None)
    largest = float((copies[0] @ copies[1].T).detach().abs().max()) / 0.7
    assert float((logprobs - expected).detach().abs().max()) <= 2 * 2**-8 * largest
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert torch.allclose(logprobs.exp().sum(), expected.exp().sum().float(), rtol=0.05)
    (logprobs.sum() + entropy.sum()).backward()
    (expected.sum() + expected_entropy.sum()).backward()
    for leaf, copy in zip(leaves, copies, strict=True):
        assert leaf.grad.dtype == torch.bfloat16
        assert float((leaf.grad.double() - copy.grad).norm() / copy.grad.norm()) < 0.03


def test_float32_head_on_bfloat16_weights() -> None:
    leaves, targets, rows = inputs(torch.bfloat16)
    logprobs, _ = token_logprobs(*leaves, targets, rows=rows, float32_head=True)
    expected, _, _ = reference(leaves, targets, rows, 1.0, None)
    torch.testing.assert_close(logprobs.double(), expected, atol=2e-5, rtol=1e-6)


def test_autocast_gives_the_matrix_product_its_type() -> None:
    leaves, targets, rows = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        cast, _ = token_logprobs(*leaves, targets, rows=rows)
    rounded, _ = token_logprobs(*(leaf.to(torch.bfloat16) for leaf in leaves), targets, rows=rows)
    assert cast.dtype == torch.float32
    assert torch.equal(cast, rounded)
    cast.sum().backward()
    assert all(leaf.grad.dtype == torch.float32 for leaf in leaves)


def test_a_frozen_head_gets_no_gradient() -> None:
    (hidden, weight), targets, rows = inputs(torch.float32)
    both = torch.stack(token_logprobs(hidden, weight, targets, rows=rows))
    (expected,) = torch.autograd.grad(both.sum(), hidden)
    frozen = torch.stack(token_logprobs(hidden, weight.detach(), targets, rows=rows))
    frozen.sum().backward()
    assert torch.equal(hidden.grad, expected)
