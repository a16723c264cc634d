"""Finding a method by name, and its parameter block."""

import dataclasses
import sys
from types import ModuleType
from typing import Annotated, get_type_hints

import pytest

from algs.grpo import GRPO
from algs.method import knob
from algs.records import Groups
from plugins.objective_parts import find_function, find_method, functions, functions_in


def test_file_name_and_dotted_path(tmp_path, monkeypatch):
    assert find_method("grpo") is GRPO
    (tmp_path / "my_lab_loss.py").write_text(
        "from algs.method import MethodParams, PolicyMethod\n"
        "class Mine(PolicyMethod):\n"
        "    class Params(MethodParams):\n"
        "        gain: float = 2.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mine = find_method("my_lab_loss:Mine")
    assert mine(mine.Params(gain=3.0)).params.gain == 3.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("grop", "no module algs.grop"),
        ("algs.grpo:GROP", "no PolicyMethod called GROP"),
        ("algs.parts.kl", "must define one PolicyMethod, found none"),
        ("nowhere.at_all:Mine", "no module nowhere.at_all"),
    ],
)
def test_a_wrong_name_is_explained(name, words):
    with pytest.raises(ValueError, match=words):
        find_method(name)


def test_an_import_error_inside_a_users_file_is_not_called_a_missing_module(tmp_path, monkeypatch):
    (tmp_path / "my_broken_loss.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="does not import: No module named 'a_package_that_is_not_there'"):
        find_method("my_broken_loss:Mine")


def test_params_are_frozen_and_carry_their_help():
    params = GRPO.Params(clip_high=0.28)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.clip_high = 0.3
    assert all(field.metadata["help"] for field in dataclasses.fields(GRPO.Params))
    with pytest.raises(TypeError):
        GRPO.Params(clip_hihg=0.28)


OWN_PARTS = """
from typing import Annotated
from algs.method import knob
from algs.records import Groups
def mine(groups: Groups, gain: Annotated[float, knob("How much.", gt=0)] = 2.0): return gain * groups.rewards
def loose(groups): return groups.rewards
def _hidden(groups: Groups): return groups.rewards
def other(x: float): return x
mine_too = mine
NUMBER = 3
"""


@pytest.fixture
def own_parts(tmp_path, monkeypatch) -> ModuleType:
    (tmp_path / "my_lab_parts.py").write_text(OWN_PARTS)
    (tmp_path / "my_lab_typed.py").write_text("def f(groups: 'Nowhere'): return groups.rewards\n")
    monkeypatch.syspath_prepend(tmp_path)
    find_function("advantage", "my_lab_parts:mine")
    return sys.modules["my_lab_parts"]


def test_functions_of_ours_and_of_a_user(own_parts):
    from algs import advantages

    assert find_function("advantage", "rloo") is advantages.rloo
    assert find_function("advantage", "algs.advantages:rloo") is advantages.rloo
    assert find_function("advantage", "my_lab_parts:mine") is own_parts.mine
    assert {"group_mean", "group_zscore", "rloo", "gae"} <= set(functions("advantage"))
    assert {"token_truncate", "token_mask", "veto"} <= set(functions("correction"))
    assert "whiten" not in functions("advantage")  # a function of tensors
    assert list(functions_in(own_parts, Groups)) == ["mine", "mine_too"]


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("advantage", "rlo", "no advantage called 'rlo'; did you mean rloo"),
        ("advantage", "whiten", "no advantage called 'whiten'; there are: group_mean"),
        ("advantage", "varies", "no advantage called 'varies'"),
        ("advantage", "token_truncate", "no advantage called 'token_truncate'; there are: group_mean"),
        ("correction", "token_trunc", "did you mean token_truncate"),
        ("advantage", "my_lab_parts:min", "my_lab_parts has no advantage called 'min'; did you mean mine"),
        ("advantage", "my_lab_parts:NUMBER", "no advantage called 'NUMBER'; there are: mine"),
        ("advantage", "my_lab_parts.mine", "is named module:function; my_lab_parts:mine?"),
        (
            "advantage",
            "my_lab_parts:loose",
            r"must be annotated as algs.records.Groups, as in def loose\(groups: Groups",
        ),
        ("correction", "my_lab_parts:mine", r"must be annotated as algs.records.PolicyTokens, as in def mine\(t: Pol"),
        ("advantage", "my_lab_typed:f", "my_lab_typed:f: an annotation cannot be read: name 'Nowhere' is not defined"),
        ("advantage", "my_lab_nowhere:f", "advantage 'my_lab_nowhere:f': there is no module my_lab_nowhere"),
    ],
)
def test_a_wrong_function_is_explained(own_parts, kind, name, words):
    with pytest.raises(ValueError, match=words):
        find_function(kind, name)


def test_a_knob_is_read_from_the_annotation():
    def f(cap: Annotated[float, knob("Largest weight.", gt=0)] | None = None) -> None: ...

    found = get_type_hints(f, include_extras=True)["cap"].__args__[0].__metadata__[0]
    assert found.help == "Largest weight." and found.bounds == {"gt": 0}
