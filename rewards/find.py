"""How a name in the configuration becomes a user's or our own function or class."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

# Files in rewards/ that are not rewards.
NOT_REWARDS = ("find", "service", "worker")


def find_reward(name: str) -> Callable[..., Any]:
    """The reward function a config names: `last_number` is rewards/last_number.py, `my_lab.rewards:score` a user's own.

    Raises:
        ValueError: there is no such module or function (with the nearest names), or the module does not import.
    """
    if name in NOT_REWARDS:
        raise ValueError(f"reward '{name}': there is no such reward; there are: {', '.join(reward_names())}")
    module, attribute = find_module(name, "reward", "rewards", reward_names())
    function = find_attribute(module, attribute or module.__name__.rpartition(".")[2], f"reward '{name}'")
    if not callable(function):
        raise ValueError(f"reward '{name}': {module.__name__}.{attribute} is not a function")
    return function


def reward_names() -> list[str]:
    """Names of the rewards that ship."""
    import rewards

    return sorted(m.name for m in pkgutil.iter_modules(rewards.__path__) if m.name not in NOT_REWARDS)


def find_module(name: str, kind: str, package: str, known: list[str]) -> tuple[ModuleType, str]:
    """Import what `name` points at: a file of `package`, or `module:attribute`. Returns the module and the attribute
    ('' when the name has none).

    Raises:
        ValueError: the module does not exist or does not import; `kind` and the nearest of `known` are in the message.
    """
    module_name, _, attribute = name.partition(":")
    if not attribute and "." not in module_name:
        if module_name not in known:
            near = difflib.get_close_matches(module_name, known, n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'? " if near else ""
            raise ValueError(
                f"{kind} '{name}': there is no {package}/{module_name}.py; {hint}there are: {', '.join(known)}; "
                "your own is named module:name"
            )
        module_name = f"{package}.{module_name}"
    try:
        return importlib.import_module(module_name), attribute
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ValueError(
                f"{kind} '{name}': there is no module {error.name}; it must be importable from the folder the run "
                "starts in (or through PYTHONPATH)"
            ) from error
        raise ValueError(f"{kind} '{name}': {module_name} does not import: {error}") from error
    except Exception as error:
        raise ValueError(f"{kind} '{name}': {module_name} does not import: {type(error).__name__}: {error}") from error


def find_attribute(module: ModuleType, attribute: str, what: str) -> Any:
    """`module.attribute`, or a ValueError with the nearest public names."""
    if hasattr(module, attribute):
        return getattr(module, attribute)
    public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
    near = difflib.get_close_matches(attribute, public, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"it defines: {', '.join(public) or 'nothing callable'}"
    raise ValueError(f"{what}: {module.__name__} has no '{attribute}'; {hint}")


def check_params(function: Callable[..., Any], name: str, params: dict[str, Any]) -> None:
    """Raise ValueError unless `function(trajectory, **params)` fits the function's signature."""
    signature = inspect.signature(function)
    try:
        signature.bind(None, **params)
    except TypeError as error:
        takes = list(signature.parameters)[1:]
        raise ValueError(
            f"reward '{name}': {error}; besides the trajectory it takes: {', '.join(takes) or 'nothing'}"
        ) from error
