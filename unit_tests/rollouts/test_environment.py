"""How an environment is found, and the trivial one."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugins.kinds import find
from records.rollout import Prompt
from rollouts.environment import Step


def test_single_turn_asks_and_ends() -> None:
    environment = find("environment", "single_turn")()
    messages = [{"role": "user", "content": "2 + 2 ="}]
    assert environment.reset(Prompt("p/0", messages)) == messages
    assert environment.step("4", [4, 2]) == Step(done=True, messages=[], token_ids=None, reward=None)


def test_a_users_own_of_several_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_world.py").write_text(
        "from rollouts.environment import Step\n"
        "class Twice:\n"
        "    turns = 0\n"
        "    def reset(self, prompt): return prompt.messages\n"
        "    def step(self, response, token_ids):\n"
        "        self.turns += 1\n"
        "        if self.turns == 2: return Step(done=True, reward=1.0)\n"
        "        return Step(done=False, messages=[{'role': 'user', 'content': 'sure?'}])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_world:Twice", "my_world:Twice"):
        world = find("environment", name)()
        first, second = world.step("yes", []), world.step("yes", [])
        assert not first.done and first.messages[0]["content"] == "sure?"
        assert second.done and second.reward == 1.0
