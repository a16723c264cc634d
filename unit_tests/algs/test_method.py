"""Finding a method by name, and its parameter block."""

import dataclasses

import pytest

from algs.grpo import GRPO
from algs.method import find_method


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
        ("algs.kl", "must define one PolicyMethod, found none"),
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
