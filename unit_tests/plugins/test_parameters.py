"""Parameters are checked, filled in and documented, whatever the shape of the plug-in."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugins.kinds import find
from plugins.parameters import check, checked, parameters_of

OWN = """
from __future__ import annotations
from typing import TYPE_CHECKING, Annotated
from pydantic import Field
from algs.method import MethodParams, PolicyMethod, knob, param
from plugins.marks import checked_by
if TYPE_CHECKING:
    from nowhere import Trajectory, Odd
def plain(trajectory, weight=1): return 1.0
def typed(trajectory: Trajectory, pair: tuple[int, int] = (0, 1), odd: Odd = None): return 1.0
def any_name(trajectory, **rest: int): return 1.0
def by_knob(trajectory, gain: Annotated[float, knob("How much.", gt=0)] = 2.0): return 1.0
def by_field(trajectory, low: Annotated[float, Field(ge=0, description="Least.")]): return 1.0
class Callable:
    def __call__(self, trajectory, low: int = 0): return 1.0
instance = Callable()
def rises(low: int, high: int) -> None:
    if low > high: raise ValueError(f"params.low: {low} is above high {high}")
@checked_by(rises)
def ruled(trajectory, low: int, high: int = 3): return 1.0
class Mine(PolicyMethod):
    class Params(MethodParams):
        reach: tuple[float, float] = param((0.1, 0.2), "How far.", )
        depth: int = param(1, "How deep.", ge=1)
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_shapes_lab.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("kind", "name", "given", "filled_in"),
    [
        ("reward", "plain", {"weight": "anything"}, {"weight": "anything"}),
        ("reward", "typed", {"pair": [1, 2]}, {"pair": (1, 2), "odd": None}),
        ("reward", "any_name", {"whatever": 1}, {"whatever": 1}),
        ("filter", "instance", {}, {"low": 0}),
        ("reward", "by_knob", {"gain": 1}, {"gain": 1.0}),
        ("reward", "ruled", {"low": 1}, {"low": 1, "high": 3}),
        ("method", "Mine", {"reach": [0.3, 0.4]}, {"reach": (0.3, 0.4), "depth": 1}),
    ],
)
def test_defaults_are_filled_in(kind: str, name: str, given: dict, filled_in: dict) -> None:
    assert checked(kind, f"my_shapes_lab:{name}", given) == filled_in


@pytest.mark.parametrize(
    ("kind", "name", "given", "complaint"),
    [
        ("reward", "typed", {"pair": [1, "x"]}, "params.pair.1: must be a whole number; given 'x'"),
        ("reward", "by_knob", {"gain": 0}, "params.gain: must be above 0.0; given 0"),
        ("reward", "by_knob", {"gain": float("nan")}, "params.gain: must be a finite number; given nan"),
        ("reward", "by_knob", {"gian": 1}, "params.gian: unknown key; did you mean gain?"),
        ("reward", "by_knob", {"zzz": 1}, "params.zzz: unknown key; there are: gain"),
        ("reward", "by_field", {}, "params.low: is missing"),
        (
            "reward",
            "by_field",
            {"low": -1, "x": 1},
            "params.low: must be at least 0.0; given -1; params.x: unknown key",
        ),
        ("reward", "ruled", {"low": 4}, "params.low: 4 is above high 3"),
        ("method", "Mine", {"depth": True}, "params.depth: must be a whole number; given true"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_text(kind: str, name: str, given: dict, complaint: str) -> None:
    with pytest.raises(ValueError) as caught:
        check(kind, f"my_shapes_lab:{name}", given)
    assert str(caught.value).startswith(f"{kind} 'my_shapes_lab:{name}': {complaint}")


def test_help_and_bounds_come_from_wherever_they_are_written() -> None:
    for kind, name, key, text in [
        ("reward", "by_knob", "gain", "How much."), ("reward", "by_field", "low", "Least."), ("method", "Mine", "depth", "How deep."),
    ]:  # fmt: skip
        field = parameters_of(find(kind, f"my_shapes_lab:{name}")).model_fields[key]
        assert field.description == text and field.metadata
