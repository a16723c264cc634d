"""Aggregation weights: against the definitions, and against the published example of how the modes differ."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algs.parts.aggregation import MODES, token_weights


def definition(mode, values, groups, max_new_tokens):
    """The loss from per-token values, straight from each mode's definition. values: a list of arrays."""
    present = [i for i, v in enumerate(values) if len(v)]
    if mode == "token_mean":
        return np.concatenate(values).sum() / sum(len(v) for v in values)
    if mode == "sequence_mean":
        return np.mean([values[i].mean() for i in present])
    if mode == "fixed_length":
        return sum(values[i].sum() for i in present) / (len(present) * max_new_tokens)
    if mode == "sequence_sum":
        return np.mean([values[i].sum() for i in present])
    prompts = sorted({groups[i] for i in present})
    return np.mean([np.concatenate([values[i] for i in present if groups[i] == g]).mean() for g in prompts])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7)), min_size=1, max_size=12), st.sampled_from(MODES))
def test_weights_reproduce_the_definition(rows, mode):
    groups = np.unique([g for g, _ in rows], return_inverse=True)[1]
    lengths = [length for _, length in rows]
    if sum(lengths) == 0:
        return
    rng = np.random.default_rng(0)
    values = [rng.normal(size=length) for length in lengths]
    weights = token_weights(mode, torch.tensor(lengths), torch.tensor(groups), max_new_tokens=10).double().numpy()
    found = sum(w * v.sum() for w, v in zip(weights, values, strict=True))
    assert found == pytest.approx(definition(mode, values, groups, 10), rel=1e-5, abs=1e-6)


def test_long_prompts_share_as_published():
    """Three prompts with lengths (100, 300), (1000, 3000), (200, 200): prompt 2 weighs 0.83 or 0.33."""
    lengths = torch.tensor([100, 300, 1000, 3000, 200, 200])
    group = torch.tensor([0, 0, 1, 1, 2, 2])
    shares = {}
    for mode in ("token_mean", "sequence_mean", "prompt_mean"):
        weights = token_weights(mode, lengths, group, 4096) * lengths
        shares[mode] = (weights[group == 1].sum() / weights.sum()).item()
    assert shares["token_mean"] == pytest.approx(0.833, abs=1e-3)
    assert shares["sequence_mean"] == pytest.approx(1 / 3)
    assert shares["prompt_mean"] == pytest.approx(1 / 3)


def test_a_response_without_tokens_counts_in_no_denominator():
    with_empty = token_weights("sequence_mean", torch.tensor([4, 0, 6]), torch.tensor([0, 0, 1]), 8)
    without = token_weights("sequence_mean", torch.tensor([4, 6]), torch.tensor([0, 1]), 8)
    assert with_empty[1] == 0
    assert torch.equal(with_empty[[0, 2]], without)


def test_unknown_mode_is_named():
    with pytest.raises(ValueError, match="token_average"):
        token_weights("token_average", torch.tensor([1]), torch.tensor([0]), 8)
