"""The checksum that every version is judged by, on CPUs and on other devices."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from rollouts.vllm.weight_file import Checksum, weighted_sum


def on_a_cpu(data: torch.Tensor) -> int:
    return Checksum([("", data)]).value()


def on_other_devices(data: torch.Tensor) -> int:
    return int(weighted_sum(data))


@pytest.mark.parametrize("checksum", [on_a_cpu, on_other_devices])
@pytest.mark.parametrize("size", [8 * 5000, 8 * 3 + 5])
def test_it_sees_single_bits_and_exchanged_words(checksum: Callable[[torch.Tensor], int], size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    sound, chance = checksum(data), random.Random(0)
    for _ in range(200):
        changed = data.clone()
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        assert checksum(changed) != sound
        words = data[: size // 8 * 8].view(torch.int64).clone()
        i, j = chance.sample(range(len(words)), 2)
        words[[i, j]] = words[[j, i]]
        assert checksum(torch.cat([words.view(torch.uint8), data[size // 8 * 8 :]])) != sound
    assert -(2**63) <= sound < 2**63


def test_on_other_devices_it_is_the_same_wherever_the_bytes_lie() -> None:
    data = torch.randint(0, 256, (4099,), dtype=torch.uint8)
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), data])[3:]
    assert on_other_devices(shifted) == on_other_devices(data)


def test_it_sees_exchanged_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.ones(10), torch.zeros(10)
    assert Checksum([("x", a), ("y", b)]).value() != Checksum([("x", b), ("y", a)]).value()
    one, other = Checksum(), Checksum()
    one._sums, other._sums = [torch.tensor(1), torch.tensor(2)], [torch.tensor(2), torch.tensor(1)]
    assert one.value() != other.value()
