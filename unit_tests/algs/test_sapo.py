"""What is special to SAPO (arXiv 2511.20347): the gate that it reports; test_algs.py holds its formula."""

import pytest

from unit_tests.algs.method_checks import make, one_token, policy_tokens, weight


@pytest.mark.parametrize(("advantage", "ratio"), [(1, 1), (-1, 1), (1, 0.5), (-1, 3), (1, 6)])
def test_reported_gate_is_the_share_of_the_gradient_that_is_kept(advantage, ratio):
    """The weight on grad log pi is gate r A; the gate is 1 at r = 1."""
    method = make("sapo")
    gate = method.loss(policy_tokens(one_token(advantage, ratio), method)).metrics["gate"].item()
    assert gate * ratio * advantage == pytest.approx(weight(method, advantage, ratio), rel=1e-4)
    assert (gate == pytest.approx(1)) == (ratio == 1)
