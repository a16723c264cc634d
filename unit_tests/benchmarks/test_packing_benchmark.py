"""The benchmarks compare like with like: every way gives the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks import chunked_logprobs, packing


@pytest.mark.parametrize("how", ["step", "micro-batch", "sorted"])
def test_padded_ways_compute_the_packed_gradient(how: str) -> None:
    rng = np.random.default_rng(0)
    drawn = packing.log_normal(5, 10, 0.8, 3, rng)
    model = packing.build_model(torch.float32)
    gradients = []
    for batches in (packing.packed(drawn, 60, False), packing.padded(drawn, 60, how)):
        packing.step(model, batches)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert float((gradients[0] - gradients[1]).abs().max()) <= 1e-5 * float(gradients[0].abs().max())


def test_rectangles_hold_the_budget_and_every_token_once() -> None:
    drawn = packing.log_normal(20, 10, 0.8, 3, np.random.default_rng(0))
    for how in ("step", "micro-batch", "sorted"):
        batches = packing.padded(drawn, 200, how)
        assert sum(int((batch.loss_weights > 0).sum()) for batch in batches) == sum(t.action_tokens for t in drawn)
        assert all(batch.tokens <= 200 or len(batch.segments) == 1 for batch in batches)
        assert all(len({s.length for s in batch.segments}) == 1 for batch in batches)


def test_chunked_and_naive_measure_the_same_quantity() -> None:
    naive, chunked = (chunked_logprobs.measure(way, 40, 300, 16, "float32") for way in ("naive", "chunked"))
    for name in ("logprob_sum", "entropy_sum", "gradient_norm"):
        assert chunked[name] == pytest.approx(naive[name], rel=1e-5)
