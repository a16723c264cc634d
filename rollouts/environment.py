"""What a response meets. Single-turn question answering is the trivial environment, so there is one rollout path."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from plugins.lookup import find_attribute, find_module
from records.rollout import Prompt


@dataclass(frozen=True)
class Step:
    """What an environment says to a response."""

    done: bool
    messages: list[dict[str, Any]] = field(default_factory=list)  # the observation; the chat template renders it
    token_ids: Sequence[int] | None = None  # the observation as tokens, where the environment makes them itself
    reward: float | None = None  # None: the scoring service decides at the end


class Environment(Protocol):
    """One episode: an object is made per trajectory, with no argument, and used by one task at a time.

    The methods run in the rollout worker's event loop and must not block it.
    """

    def reset(self, prompt: Prompt) -> list[dict[str, Any]]:
        """The messages to begin with."""
        ...

    def step(self, response: str, token_ids: Sequence[int]) -> Step:
        """Take one response (its text, and its tokens as sampled) and say what follows."""
        ...


def find_environment(name: str) -> type[Environment]:
    """The class a config names: `single_turn` is the one in rollouts/environments/single_turn.py, `my_lab.world:World`
    a user's own.

    Raises:
        ValueError: there is no such module or class (with the nearest names), or the module does not import.
    """
    module, attribute = find_module(name, "environment", "rollouts.environments", environment_names())
    if attribute:
        found = find_attribute(module, attribute, f"environment '{name}'")
    else:
        own = [v for v in vars(module).values() if inspect.isclass(v) and v.__module__ == module.__name__]
        fitting = [v for v in own if hasattr(v, "reset") and hasattr(v, "step")]
        if len(fitting) != 1:
            names = ", ".join(v.__name__ for v in fitting) or "none"
            raise ValueError(f"environment '{name}': {module.__name__} must define one environment, found {names}")
        found = fitting[0]
    if not (inspect.isclass(found) and hasattr(found, "reset") and hasattr(found, "step")):
        raise ValueError(f"environment '{name}': {module.__name__}.{attribute} is no class with reset and step")
    return found


def environment_names() -> list[str]:
    """Names of the environments that ship."""
    import rollouts.environments

    return sorted(m.name for m in pkgutil.iter_modules(rollouts.environments.__path__))
