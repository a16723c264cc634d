"""What a configuration names is found, ours and a user's own; what is wrong with a name is said, with the way out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from algs import advantages
from algs.grpo import GRPO
from plugins.kinds import KINDS, RENAMED, find, labels, listed
from rewards.last_number import last_number
from rollouts.environments.single_turn import SingleTurn

OWN = """
from algs.method import MethodParams, PolicyMethod
from algs.records import Groups
class Mine(PolicyMethod):
    class Params(MethodParams):
        gain: float = 2.0
class World:
    def reset(self, prompt): return prompt.messages
    def step(self, response, token_ids): ...
def mine(groups: Groups): return groups.rewards
def loose(groups): return groups.rewards
def score(trajectory): return 1.0
NUMBER = 3
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_kinds_lab.py").write_text(OWN)
    (tmp_path / "my_typed_lab.py").write_text(
        "from __future__ import annotations\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from algs.records import Groups\n"
        "def mine(groups: Groups): return groups.rewards\n"
    )
    (tmp_path / "needs_something.py").write_text("import not_installed_at_all\n")
    (tmp_path / "bad_syntax.py").write_text("def score(:\n")
    (tmp_path / "raises.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("my_kinds_lab", "my_typed_lab"):
        sys.modules.pop(name, None)


def test_ours_are_found_by_name() -> None:
    assert find("method", "grpo") is GRPO
    assert find("advantage", "rloo") is find("advantage", "algs.advantages:rloo") is advantages.rloo
    assert find("reward", "last_number") is find("reward", "rewards.last_number:last_number") is last_number
    assert find("environment", "single_turn") is SingleTurn
    assert find("filter", "overlong").refill is False
    assert find("correction", "veto").__module__ == "algs.corrections"


def test_a_users_own_is_module_and_name_for_every_kind() -> None:
    assert find("method", "my_kinds_lab:Mine").Params().gain == 2.0
    for kind, name in [("environment", "World"), ("advantage", "mine"), ("reward", "score"), ("filter", "loose")]:
        assert find(kind, f"my_kinds_lab:{name}").__name__ == name
    assert find("advantage", "my_typed_lab:mine"), "the annotation may be there for type checkers only"


@pytest.mark.parametrize(
    ("kind", "name", "complaint"),
    [
        ("method", "grop", "there is no method of that name; did you mean grpo?"),
        ("method", "parts", "there is no method of that name; your own is named module:name, and ours are: aipo, "),
        ("method", "records", "there is no method of that name"),
        ("advantage", "whiten", "your own is named module:name, and ours are: group_mean, group_zscore"),
        ("advantage", "token_truncate", "there is no advantage of that name"),
        ("correction", "token_trunc", "did you mean token_truncate?"),
        ("reward", "last_numbr", "did you mean last_number?"),
        ("reward", "scoring", "there is no reward of that name"),
        ("filter", "overlongs", "did you mean overlong?"),
        ("environment", "single_tern", "did you mean single_turn?"),
        ("reward", "my_lab.rewards.score", "your own is named module:name; did you mean my_lab.rewards:score?"),
        (
            "reward",
            "no_such_lab.rewards:score",
            "there is no module no_such_lab; it must be importable from the folder",
        ),
        ("method", "algs.grpo:GROP", "algs.grpo has no method called 'GROP'; did you mean GRPO?"),
        ("advantage", "my_kinds_lab:min", "my_kinds_lab has no advantage called 'min'; did you mean mine?"),
        ("environment", "my_kinds_lab:Wrld", "my_kinds_lab has no environment called 'Wrld'; did you mean World?"),
        ("method", "my_kinds_lab:World", "must be a class that inherits from algs.method.PolicyMethod"),
        ("environment", "my_kinds_lab:Mine", "must be a class with the methods reset and step"),
        ("reward", "my_kinds_lab:NUMBER", "must be a function"),
        (
            "advantage",
            "my_kinds_lab:loose",
            "must be a function whose first parameter is annotated as algs.records.Groups",
        ),
        ("correction", "my_kinds_lab:mine", "first parameter is annotated as algs.records.PolicyTokens"),
        ("reward", "needs_something:score", "needs_something does not import: No module named 'not_installed_at_all'"),
        ("reward", "bad_syntax:score", "bad_syntax does not import: SyntaxError: invalid syntax"),
        ("filter", "raises:keep", "raises does not import: ZeroDivisionError: division by zero"),
    ],
)
def test_a_wrong_name_is_explained(kind: str, name: str, complaint: str) -> None:
    with pytest.raises(ValueError) as caught:
        find(kind, name)
    assert str(caught.value).startswith(f"{kind} '{name}': ") and complaint in str(caught.value)


@pytest.mark.parametrize(("kind", "old"), RENAMED)
def test_an_old_name_is_refused_with_the_new_one(kind: str, old: str) -> None:
    with pytest.raises(ValueError, match=f"{kind} '{old}' is now called ") as caught:
        find(kind, old)
    new = str(caught.value).partition(" is now called ")[2].split()[0]
    assert new in listed(kind) and old not in listed(kind)


def test_all_of_ours_are_what_their_kind_demands() -> None:
    for kind in KINDS:
        assert listed(kind), kind
        for name, entry in listed(kind).items():
            assert find(kind, name) is find(kind, f"{entry.module}:{entry.attribute}")
            assert entry.summary, f"{kind} {name} has no docstring"


def test_ours_are_listed_without_importing_them() -> None:
    code = (
        "import sys; from plugins.kinds import KINDS, listed; [listed(kind) for kind in KINDS]\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'algs.method', 'rewards.gsm8k'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_labels_are_short_and_unique() -> None:
    assert labels(["length", "my_lab.parts:length", "gsm8k"]) == ["length", "length#2", "gsm8k"]
