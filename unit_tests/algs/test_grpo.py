"""What is special to GRPO (arXiv 2402.03300): its metric; test_algs.py holds its formula."""

from hypothesis import given, settings

from unit_tests.algs.method_checks import (
    gradient,
    make,
    policy_tokens,
    steps,
)


@settings(max_examples=20)
@given(steps())
def test_clip_fraction_counts_tokens_without_gradient(step):
    """The metric clip_fraction marks exactly the tokens with an advantage whose gradient the clip has taken."""
    method = make("grpo")
    marked = method.loss(policy_tokens(step, method)).metrics["clip_fraction"].bool().numpy()
    silent = (gradient(method, step) == 0) & (step.advantage != 0)
    assert (marked[step.advantage != 0] == silent[step.advantage != 0]).all()
