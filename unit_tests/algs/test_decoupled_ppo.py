"""What is special to decoupled PPO (arXiv 2110.00641): its behaviour weight; test_algs.py holds its formula."""

import pytest

from unit_tests.algs.method_checks import (
    make,
    weight,
)


@pytest.mark.parametrize(("behavior_ratio", "expected"), [(0.5, 0.5), (3.0, 3.0), (7.0, 5.0)])
def test_behaviour_weight_is_frozen_and_capped(behavior_ratio, expected):
    """At u = 1 the weight on grad log pi is pi_old/mu up to the cap 5: it scales the surrogate, and has no gradient."""
    assert weight(make("decoupled_ppo"), 1, 1, behavior_ratio) == pytest.approx(expected, rel=1e-5)
