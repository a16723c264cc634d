"""What is special to GSPO (arXiv 2507.18071): its two levels; test_algs.py holds its formula."""

import numpy as np

from unit_tests.algs.method_checks import (
    gradient,
    make,
    policy_tokens,
    random_step,
)


def test_both_levels_have_one_value():
    """The token level has the sequence level's loss values; only its gradient is put on the tokens differently."""
    step = random_step([3, 2], [4, 1, 7, 2, 5], np.random.default_rng(1), by_token=True)
    sequence, token = (make("gspo", level=level) for level in ("sequence", "token"))
    values = [m.loss(policy_tokens(step, m)).loss.detach().numpy() for m in (sequence, token)]
    np.testing.assert_allclose(*values, rtol=1e-6)
    assert not np.allclose(gradient(sequence, step), gradient(token, step))


def test_with_one_advantage_per_response_both_levels_have_one_gradient():
    """With one advantage for the whole response the two levels agree in the gradient of the response's mean too."""
    step = random_step([3, 2], [4, 1, 7, 2, 5], np.random.default_rng(1))
    np.testing.assert_allclose(
        gradient(make("gspo", level="sequence"), step),
        gradient(make("gspo", level="token"), step),
        rtol=1e-4,
        atol=1e-6,
    )
