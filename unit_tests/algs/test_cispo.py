"""What is special to CISPO (arXiv 2506.13585): its floor; test_algs.py holds its formula."""

import pytest

from unit_tests.algs.method_checks import (
    make,
    weight,
)


def test_floor_holds_a_small_ratio_up():
    """With ratio_floor 0.5, a token of ratio 0.1 keeps the weight 0.5."""
    assert weight(make("cispo", ratio_floor=0.5), 1, 0.1) == pytest.approx(0.5)


def test_a_floor_above_the_cap_is_refused():
    """Params that cannot both hold are refused with the way out."""
    with pytest.raises(ValueError, match="ratio_floor"):
        make("cispo", ratio_floor=6.0)
