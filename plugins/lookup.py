"""How a name in the configuration becomes a user's or our own function or class."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

F = TypeVar("F", bound=Callable[..., Any])

# Files in rewards/ that are not rewards.
NOT_REWARDS = ("find", "judge", "sandbox", "scoring")


def find_reward(name: str) -> Callable[..., Any]:
    """The reward function a config names: `last_number` is rewards/last_number.py, `my_lab.rewards:score` a user's own.

    Raises:
        ValueError: there is no such module or function (with the nearest names), or the module does not import.
    """
    if name in NOT_REWARDS:
        raise ValueError(f"reward '{name}': there is no such reward; there are: {', '.join(reward_names())}")
    return find_function(name, "reward", "rewards", reward_names())


def reward_names() -> list[str]:
    """Names of the rewards that ship."""
    import rewards

    return sorted(m.name for m in pkgutil.iter_modules(rewards.__path__) if m.name not in NOT_REWARDS)


def find_function(name: str, kind: str, package: str, known: list[str]) -> Callable[..., Any]:
    """The function that is named as its file in `package`, or a user's own by dotted path.

    Raises:
        ValueError: as find_module, or it is no function.
    """
    module, attribute = find_module(name, kind, package, known)
    attribute = attribute or module.__name__.rpartition(".")[2]
    function = find_attribute(module, attribute, f"{kind} '{name}'")
    if not callable(function):
        raise ValueError(f"{kind} '{name}': {module.__name__}.{attribute} is not a function")
    return function  # type: ignore[no-any-return]


def labels(names: Sequence[str]) -> list[str]:
    """Short names for logs, unique in the list: the function's own, numbered from its second use on."""
    used: dict[str, int] = {}
    found = []
    for name in names:
        short = name.rpartition(":")[2].rpartition(".")[2]
        used[short] = used.get(short, 0) + 1
        found.append(short if used[short] == 1 else f"{short}#{used[short]}")
    return found


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


def checked_by(rule: Callable[..., None]) -> Callable[[F], F]:
    """Give a function a rule on its parameters that annotations cannot say: `rule(**parameters)`, defaults filled in,
    raises ValueError. It is asked before a run starts."""

    def marked(function: F) -> F:
        function.rule = rule  # type: ignore[attr-defined]
        return function

    return marked


def of_group(function: F) -> F:
    """Mark a reward function as one of a whole group, `f(group, **params)`, called when all members are generated and
    paid by the other parts (`trajectory.reward` is the sum so far, None where that failed). It returns a list with what
    a reward returns, one per member in the group's order."""
    function.of_group = True  # type: ignore[attr-defined]
    return function


def is_of_group(function: Callable[..., Any]) -> bool:
    return getattr(function, "of_group", False)


def check_params(function: Callable[..., Any], what: str, params: dict[str, Any]) -> None:
    """Refuse parameters that do not fit `function(record, **params)`: names, annotated types and bounds, its own rule.

    Raises:
        ValueError: beginning with `what` (such as "reward 'length'"), naming the parameter.
    """
    signature = inspect.signature(function)
    try:
        bound = signature.bind(None, **params)
    except TypeError as error:
        takes = list(signature.parameters)[1:]
        raise ValueError(f"{what}: {error}; its parameters are: {', '.join(takes) or 'none'}") from error
    problems = [
        problem
        for name, value in params.items()
        if name in signature.parameters
        for problem in _type_problems(function, name, signature.parameters[name].annotation, value)
    ]
    if problems:
        raise ValueError(f"{what}: {'; '.join(problems)}")
    if rule := getattr(function, "rule", None):
        bound.apply_defaults()
        try:
            rule(**dict(list(bound.arguments.items())[1:]))
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from error


def _type_problems(function: Callable[..., Any], name: str, annotation: Any, value: Any) -> list[str]:
    """What is wrong with one parameter's value, by its annotation; nothing when it has none."""
    from pydantic import ConfigDict, Field, ValidationError, create_model

    if annotation is inspect.Parameter.empty:
        return []
    holder = SimpleNamespace(__annotations__={name: annotation})
    try:
        hint = get_type_hints(holder, getattr(function, "__globals__", {}), include_extras=True)[name]
    except NameError:  # imported for type checkers only: it is no type that YAML could hold
        return []
    bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    field = Field(strict=False) if get_origin(bare) in (tuple, set, frozenset) else ...  # YAML has lists only
    config = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True, protected_namespaces=())
    try:
        create_model("Parameter", __config__=config, value=(hint, field)).model_validate({"value": value})
    except ValidationError as error:
        return [
            f"params.{'.'.join(map(str, (name, *found['loc'][1:])))}: {found['msg']}; given {found['input']!r}"
            for found in error.errors()
        ]
    return []
