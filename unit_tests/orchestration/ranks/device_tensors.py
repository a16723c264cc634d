"""What both processes of test_device_publisher.py can make: the tensors of a version."""

from collections.abc import Iterator

import torch


def tensors(version: int, sizes: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Of several dtypes, all different; the first one strided."""
    generator = torch.Generator().manual_seed(version)
    for i, size in enumerate(sizes):
        made = torch.randn(2, size, generator=generator)
        yield f"{i}", [made.T, made.bfloat16(), made[0]][i % 3]
