"""A part that kept its old values is found at any step size, in plain and in packed weights; vLLM's own layers are in
unit_tests/e2e/test_engine_sync.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rollouts.vllm.resident_weights import COLUMNS, Comparing, ResidentWeights, fingerprint

RATES = [1e-5, 1e-6, 1e-7]
WIDTH = 3 * COLUMNS


def product_with(weight: Tensor) -> Callable[..., Tensor]:
    """A packed weight as a layer on a CPU has one."""
    return lambda x, ignored, bias: x @ weight.T


class Model(nn.Module):
    """A fused projection that may be packed, experts in one tensor, and a head tied to the embedding."""

    def __init__(self, dtype: torch.dtype, packs: bool) -> None:
        super().__init__()
        self.fused, self.experts, self.embedding, self.head = (nn.Module() for _ in range(4))
        self.experts.w13_weight = nn.Parameter(torch.zeros(4, 6, WIDTH, dtype=dtype), requires_grad=False)
        self.embedding.weight = nn.Parameter(torch.zeros(40, WIDTH, dtype=dtype), requires_grad=False)  # 3 pad
        self.head.weight = self.embedding.weight
        self.dtype, self.packs = dtype, packs
        self.unpack()
        self.pack()

    def unpack(self) -> None:
        """As vLLM's reload begins."""
        self.fused.weight = nn.Parameter(torch.zeros(24, WIDTH, dtype=self.dtype), requires_grad=False)

    def pack(self) -> None:
        """As it ends: of a linear layer only the packed weight is kept."""
        self.was_fused = self.fused.weight.detach().clone()
        if self.packs:
            self.fused.cpu_linear = product_with(self.was_fused)
            self.fused.weight = nn.Parameter(torch.empty(0, dtype=self.dtype), requires_grad=False)
            self.embedding.cpu_linear = product_with(self.embedding.weight.detach().clone())
            self.head.cpu_linear = self.embedding.cpu_linear


def sent(dtype: torch.dtype) -> dict[str, Tensor]:
    """A trainer's float32 weights, of ordinary size; engines get them rounded."""
    shapes = {"q": (16, WIDTH), "k": (8, WIDTH), "embedding": (37, WIDTH)} | {f"e{i}": (6, WIDTH) for i in range(4)}
    return {name: 0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, (name, shape) in
            enumerate(shapes.items())}  # fmt: skip


def load(model: Model, resident: ResidentWeights, tensors: dict[str, Tensor], version: int) -> None:
    """As vLLM's loaders: into slices."""
    model.unpack()
    with resident.noting(version):
        model.fused.weight.data[:16].copy_(tensors["q"])
        model.fused.weight.data[16:].copy_(tensors["k"])
        for i in range(4):
            model.experts.w13_weight.data[i].copy_(tensors[f"e{i}"])
        model.embedding.weight.data[:37].copy_(tensors["embedding"])
        model.embedding.weight.data[37:].fill_(0)
    model.pack()


def put_back(model: Model, old: Tensor, rows: slice) -> None:
    """Put old rows of the fused weight back, where the layer computes with them."""
    mixed = model.was_fused.clone()
    mixed[rows] = old[rows]
    if model.packs:
        model.fused.cpu_linear = product_with(mixed)
    else:
        model.fused.weight.data.copy_(mixed)


@pytest.mark.parametrize("packs", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rate", RATES)
def test_every_stale_part_is_found(rate: float, dtype: torch.dtype, packs: bool) -> None:
    model = Model(dtype, packs)
    resident = ResidentWeights(model, torch.device("cpu"), [(model.head, model.embedding)])
    weights = sent(dtype)
    load(model, resident, weights, version=1)
    assert resident.read_back() == (1.0, [])
    old = {name: tensor.detach().clone() for name, tensor in model.named_parameters()} | {"fused": model.was_fused}
    head = getattr(model.head, "cpu_linear", None)
    # a step changes in bfloat16 only those weights that it brings over to the next number
    grown = {name: tensor + rate * torch.sign(torch.randn_like(tensor)) for name, tensor in weights.items()}
    if dtype == torch.bfloat16:  # put one column of each to where it crosses
        for name, tensor in weights.items():
            grown[name][:, COLUMNS * 2 + 1] = tensor[:, COLUMNS * 2 + 1].bfloat16().float() * (1 + 2**-7)

    def new() -> None:
        load(model, resident, grown, version=2)
        assert resident.read_back() == (1.0, [])

    new()
    put_back(model, old["fused"], slice(4, 8))  # one head's rows
    assert resident.read_back()[1] == ["fused.weight (1 of 2 comparisons)"]
    new()
    model.experts.w13_weight.data[2] = old["experts.w13_weight"][2]
    assert resident.read_back()[1] == ["experts.w13_weight (1 of 4 comparisons)"]
    if packs:
        new()
        model.head.cpu_linear = head
        assert resident.read_back()[1] == ["embedding.weight (1 of 3 comparisons)"]  # itself, its product, the head's
    new()
    put_back(model, old["fused"], slice(None))
    model.experts.w13_weight.data.copy_(old["experts.w13_weight"])
    model.embedding.weight.data.copy_(old["embedding.weight"])
    assert len(resident.read_back()[1]) == 3


def test_every_column_of_a_packed_weight_has_its_turn() -> None:
    model = Model(torch.float32, packs=True)
    resident, found = ResidentWeights(model, torch.device("cpu"), []), []
    for version in range(WIDTH // COLUMNS):
        load(model, resident, sent(torch.float32), version)
        changed = model.was_fused.clone()
        changed[5, 40] += 1e-7
        model.fused.cpu_linear = product_with(changed)
        found.append(bool(resident.read_back()[1]))
    assert found == [False, True, False]


def test_a_layout_that_cannot_be_read_is_not_counted_as_read() -> None:
    model = Model(torch.float32, packs=False)
    resident = ResidentWeights(model, torch.device("cpu"), [])
    load(model, resident, sent(torch.float32), 1)
    model.experts.w13_weight = nn.Parameter(model.experts.w13_weight.transpose(1, 2).contiguous())
    share, other = resident.read_back()
    assert other == [] and share == pytest.approx(1 - 24 / (24 + 24 + 37))


class Reordering:
    """As vLLM's for experts on a CPU: weights get another order and keep their shape."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.w13_weight.data.copy_(layer.w13_weight.data.flip(-1))


def test_weights_in_an_order_of_their_own_are_read_before_and_after() -> None:
    model, method = Model(torch.float32, packs=False), Reordering()
    model.experts.quant_method = method
    resident, weights = ResidentWeights(model, torch.device("cpu"), []), sent(torch.float32)

    def processed(stale: bool) -> list[str]:
        with resident.noting(1):
            for i in range(4):
                model.experts.w13_weight.data[i].copy_(weights[f"e{i}"])
            if stale:
                model.experts.w13_weight.data[2].sub_(1e-7)
            method.process_weights_after_loading(model.experts)
        return resident.read_back()[1]

    assert processed(stale=False) == []
    before = model.experts.w13_weight.clone()
    weights = {name: tensor + 1e-7 for name, tensor in weights.items()}
    assert processed(stale=True) == ["experts.w13_weight (1 of 5 comparisons)"]
    assert processed(stale=False) == []
    model.experts.w13_weight.data[1] = before[1]
    assert resident.read_back()[1] == ["experts.w13_weight (1 of 5 comparisons)"]
    assert "process_weights_after_loading" not in vars(method)


def test_zeros_of_both_signs_are_one_value_and_small_numbers_are_not() -> None:
    assert fingerprint(torch.tensor([-0.0, 1e-40])) == fingerprint(torch.tensor([0.0, 0.0]))
    assert fingerprint(torch.tensor([1e-30])) != fingerprint(torch.tensor([0.0]))


def test_comparing_copies_nothing_and_counts_what_differs() -> None:
    held, other = torch.ones(2, 3), torch.ones(3)
    with Comparing() as compared:
        held[0] = 0
        held[0].copy_(other)
        held[1].copy_(2 * other)
    assert (compared.copies, compared.differing) == (2, 1)
    assert (held == 1).all()
