"""pass@k against exhaustive enumeration, and the interval against theory."""

import itertools

import numpy as np
import pytest

from eval.pass_at_k import ks_up_to, mean_with_interval, pass_at_k


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_equals_enumeration(samples):
    for correct in range(samples + 1):
        passed = [i < correct for i in range(samples)]
        for k in range(1, samples + 1):
            draws = list(itertools.combinations(passed, k))
            assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_more_than_the_samples_is_refused():
    with pytest.raises(ValueError, match="pass@9"):
        pass_at_k(8, 4, 9)


def test_ks():
    assert ks_up_to(1) == [1]
    assert ks_up_to(8) == [1, 2, 4, 8]
    assert ks_up_to(12) == [1, 2, 4, 8, 12]


def test_interval_covers_as_the_normal_approximation_does():
    values = np.repeat([0.0, 1.0], [60, 140])
    mean, low, high = mean_with_interval(values)
    half = 1.96 * np.sqrt(0.7 * 0.3 / 200)
    assert mean == pytest.approx(0.7)
    assert low == pytest.approx(0.7 - half, abs=0.01)
    assert high == pytest.approx(0.7 + half, abs=0.01)
