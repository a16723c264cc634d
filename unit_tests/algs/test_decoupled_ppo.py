"""What is special to decoupled PPO (arXiv 2110.00641): its behaviour weight; test_algs.py holds its formula."""

import pytest

from unit_tests.algs.method_checks import (
    make,
    one_token,
    policy_tokens,
    weight,
)


@pytest.mark.parametrize(("behavior_ratio", "dropped", "clamped"), [(0.5, 0.5, 0.5), (3, 3, 3), (8, 0, 5)])
def test_behaviour_weight_is_frozen_and_capped(behavior_ratio, dropped, clamped):
    """At u = 1 the weight on grad log pi is pi_old/mu up to the cap 5; past it AReaL's code drops the token."""
    assert weight(make("decoupled_ppo"), 1, 1, behavior_ratio) == pytest.approx(dropped, rel=1e-5)
    clamp = make("decoupled_ppo", above_cap="clamp")
    assert weight(clamp, 1, 1, behavior_ratio) == pytest.approx(clamped, rel=1e-5)


@pytest.mark.parametrize("above_cap", ["drop", "clamp"])
def test_weight_at_the_cap_itself_is_kept_and_not_counted(above_cap):
    """w = cap is within the cap: the weight stays, and behavior_cap_fraction counts only what is above."""
    method = make("decoupled_ppo", above_cap=above_cap, behavior_cap=1.0)  # exp(0) is 1 without rounding
    for ratio, capped in ((1.0, 0), (1.5, 1)):
        answer = method.loss(policy_tokens(one_token(1, 1, ratio), method))
        assert answer.metrics["behavior_cap_fraction"].item() == capped
    assert weight(method, 1, 1, 1.0) == 1
