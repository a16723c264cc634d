"""Off-policy corrections against loops over responses and tokens, and what each promises."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algs import corrections
from unit_tests.algs import reference
from unit_tests.algs.method_checks import make, policy_tokens, positions, random_step, steps

CASES = [
    ("token_truncate", {}),
    ("token_truncate", {"cap": 1.1}),
    ("token_mask", {}),
    ("token_mask", {"low": 0.9, "high": 1.2}),
    ("sequence_truncate", {}),
    ("sequence_truncate", {"cap": 5.0}),
    ("sequence_mask", {"low": 0.3, "high": 3.0}),
    ("geometric_mask", {"low": 0.8, "high": 1.3}),
    ("veto", {}),
    ("veto", {"threshold": 0.3}),
]
case = pytest.mark.parametrize(
    ("name", "params"), CASES, ids=[f"{n}-{'-'.join(map(str, p.values()))}" for n, p in CASES]
)


def correct(name, step, **params):
    return getattr(corrections, name)(policy_tokens(step, make("grpo")), **params)


@case
@settings(max_examples=30)
@given(step=steps())
def test_equal_the_loops(name, params, step):
    """Factor and choice of every token are the formula's, from rho = pi_old/mu, on random ragged groups."""
    found = correct(name, step, **params)
    log_rho = step.old - step.mu
    rows = [row for part in step.slices for row in getattr(reference, name)([log_rho[i] for i in part], **params)]
    weights, keep = (np.array(x) for x in zip(*rows, strict=True))
    assert found.keep.dtype == torch.bool and (found.keep.numpy() == keep).all()
    np.testing.assert_allclose((found.weights * found.keep).numpy(), weights * keep, rtol=1e-5)


@case
def test_without_a_gap_nothing_changes(name, params):
    """When the trainer agrees with the engine, every factor is 1 and every token is kept."""
    step = random_step([2, 3], [4, 1, 6, 2, 3], np.random.default_rng(0))
    found = correct(name, reference.dataclasses.replace(step, mu=step.old), **params)
    assert (found.weights == 1).all() and found.keep.all()


@case
@settings(max_examples=20)
@given(step=steps(), seed=st.integers(0, 99))
def test_a_response_is_corrected_by_itself_alone(name, params, step, seed):
    """The answer for a response is the same alone, in any micro-batch and in any order."""
    whole = correct(name, step, **params)
    order = np.random.default_rng(seed).permutation(len(step.lengths)).tolist()
    for part in (order[: len(order) // 2], order[len(order) // 2 :]):
        found = getattr(corrections, name)(policy_tokens(step, make("grpo"), part), **params)
        index = torch.from_numpy(positions(step, part))
        assert torch.equal(found.keep, whole.keep[index])
        torch.testing.assert_close(found.weights, whole.weights[index], rtol=1e-5, atol=0)


@case
@pytest.mark.parametrize("gap", [-300.0, -50.0, 50.0, 300.0])
def test_factors_stay_finite_and_carry_no_gradient(name, params, gap):
    """A hopeless gap between trainer and engine gives no Inf or NaN factor, and no factor has a gradient."""
    step = random_step([2, 3], [4, 1, 6, 2, 3], np.random.default_rng(0))
    found = correct(name, reference.dataclasses.replace(step, mu=step.old - gap), **params)
    assert torch.isfinite(found.weights).all() and not found.weights.requires_grad
    assert (found.weights >= 0).all()


@pytest.mark.parametrize("name", ["sequence_mask", "geometric_mask"])
def test_defaults_keep_a_small_gap(name):
    """Under the defaults a response whose rho is within a thousandth of 1 is kept, one with rho 10 everywhere is not."""
    step = random_step([2], [4, 3], np.random.default_rng(0))
    assert correct(name, reference.dataclasses.replace(step, mu=step.old + 1e-3)).keep.all()
    assert not correct(name, reference.dataclasses.replace(step, mu=step.old - np.log(10))).keep.any()


def test_one_bad_token_vetoes_its_whole_response_only():
    """One token with rho 5e-5 takes its response of three tokens out, and leaves the other response alone."""
    step = random_step([2], [3, 2], np.random.default_rng(0))
    mu = step.old.copy()
    mu[1] -= np.log(5e-5)
    assert correct("veto", reference.dataclasses.replace(step, mu=mu)).keep.tolist() == [False] * 3 + [True] * 2


@pytest.mark.parametrize(
    ("name", "params", "kept"),
    [
        ("token_mask", {"low": 1.0, "high": 2.0}, True),
        ("token_mask", {"low": 0.5, "high": 1.0}, True),
        ("sequence_mask", {"low": 1.0, "high": 2.0}, True),
        ("sequence_mask", {"low": 0.5, "high": 1.0}, True),
        ("geometric_mask", {"low": 1.0, "high": 2.0}, True),
        ("geometric_mask", {"low": 0.5, "high": 1.0}, True),
        ("veto", {"threshold": 1.0}, True),
        ("veto", {"threshold": 1.0 + 2**-20}, False),
    ],
)
def test_what_lies_on_a_bound_is_kept(name, params, kept):
    """low <= rho <= high and "below the threshold": rho = 1, which has no rounding, on each bound."""
    step = random_step([2], [3, 2], np.random.default_rng(0))
    found = correct(name, reference.dataclasses.replace(step, mu=step.old), **params)
    assert found.keep.all() if kept else not found.keep.any()
