"""The exponential of a log-ratio: exact as far as any ratio means something, finite past it."""

import math

import pytest
import torch

from algs.parts.ratio import LARGEST, ratio, ratio_minus_one


def test_up_to_the_bound_they_are_the_exponential_to_the_bit():
    x = torch.linspace(-120, LARGEST, 5001)
    assert torch.equal(ratio(x), torch.exp(x)) and torch.equal(ratio_minus_one(x), torch.expm1(x))


@pytest.mark.parametrize("function", [ratio, ratio_minus_one])
def test_value_and_slope_are_continuous_at_the_bound_and_straight_past_it(function):
    x = torch.tensor([LARGEST, LARGEST + 1e-5, 40, 100, 1e4], dtype=torch.float64, requires_grad=True)
    y = function(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert slope.tolist() == pytest.approx([math.exp(LARGEST)] * 5)
    assert y.tolist() == pytest.approx([math.exp(LARGEST) * (1 + z - LARGEST) for z in x.tolist()], rel=1e-9)


def test_what_is_no_number_stays_so():
    assert ratio(torch.tensor([math.nan, math.inf, -math.inf])).tolist()[1:] == [math.inf, 0.0]
    assert math.isnan(ratio(torch.tensor(math.nan)))
