"""How a method's parameters are written down."""

import dataclasses
from typing import Annotated, get_type_hints

import pytest

from algs.grpo import GRPO
from algs.method import knob


def test_params_are_frozen_and_carry_their_help():
    params = GRPO.Params(clip_high=0.28)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.clip_high = 0.3
    assert all(field.metadata["help"] for field in dataclasses.fields(GRPO.Params))
    with pytest.raises(TypeError):
        GRPO.Params(clip_hihg=0.28)


def test_a_knob_is_read_from_the_annotation():
    def f(cap: Annotated[float, knob("Largest weight.", gt=0)] | None = None) -> None: ...

    found = get_type_hints(f, include_extras=True)["cap"].__args__[0].__metadata__[0]
    assert found.help == "Largest weight." and found.bounds == {"gt": 0}
