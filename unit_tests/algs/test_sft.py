"""SFT is maximum likelihood."""

from hypothesis import given, settings

from unit_tests.algs import reference
from unit_tests.algs.method_checks import check_gradient, check_values, steps


@settings(max_examples=20)
@given(steps(max_groups=2, max_size=3, max_length=5))
def test_loss_and_gradient_are_those_of_minus_log_pi(step):
    """Each trained token's loss is −log π and its weight on grad log pi is 1, whatever the advantage."""
    check_values("sft", reference.sft, step)
    check_gradient("sft", reference.sft, step)
