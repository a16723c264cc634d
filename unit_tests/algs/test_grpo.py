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
    """clip_fraction and dual_clip_fraction mark exactly the tokens with an advantage whose gradient a clip has taken."""
    method = make("grpo")
    metrics = method.loss(policy_tokens(step, method)).metrics
    marked = (metrics["clip_fraction"] + metrics["dual_clip_fraction"]).bool().numpy()
    silent = (gradient(method, step) == 0) & (step.advantage != 0)
    assert (marked[step.advantage != 0] == silent[step.advantage != 0]).all()
