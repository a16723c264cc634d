"""The parameters of a plug-in: a pydantic model that checks them, fills them in and documents them."""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from plugins.kinds import find
from plugins.nearest import hint
from plugins.wording import text_of

BOUNDS = ("ge", "gt", "le", "lt")


def checked(kind: str, name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return a plug-in's parameters, checked by type, bounds and its own rule, with defaults filled in.

    Raises:
        ValidationError: parameters are wrong; it says which.
        ValueError: nothing of that name is found, or its own rule refuses the parameters together.
    """
    plugin = find(kind, name)
    try:
        return values_for(plugin, given)
    except ValidationError:
        raise
    except ValueError as error:
        raise ValueError(f"{kind} '{name}': {error}") from error


def check(kind: str, name: str, given: dict[str, Any]) -> None:
    """Check parameters as `checked` does, and report every problem in one text.

    Raises:
        ValueError: nothing of that name is found, or it does not take these parameters.
    """
    try:
        checked(kind, name, given)
    except ValidationError as error:
        known = list(parameters_of(find(kind, name)).model_fields)
        problems = [
            f"params.{'.'.join(map(str, item['loc']))}: "
            + (
                f"unknown key; {hint(str(item['loc'][-1]), known)}"
                if item["type"] == "extra_forbidden"
                else text_of(item)
            )
            for item in error.errors(include_url=False)
        ]
        raise ValueError(f"{kind} '{name}': {'; '.join(problems)}") from error


def values_for(plugin: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the checked parameters of a plug-in that was found. Raise what `checked` raises."""
    values = parameters_of(plugin).model_validate(given).model_dump()
    rule = getattr(plugin, "Params", None) or getattr(plugin, "rule", None)  # see algs.method and plugins.marks
    if rule is not None:
        rule(**values)
    return values


def parameters_of(plugin: Any) -> type[BaseModel]:
    """Return a pydantic model with the parameters of a plug-in: types, bounds, defaults and help.

    A method's parameters are the fields of its `Params`. A function's are those after its first, with bounds and help
    from `knob` or from pydantic's `Field`; a function with `**others` takes any further key. Other classes have none.

    Raises:
        ValueError: a parameter cannot be given by name.
    """
    if hasattr(plugin, "Params"):
        fields, takes_others = _fields_of_params(plugin.Params), False
    elif inspect.isclass(plugin):
        fields, takes_others = {}, False
    else:
        fields, takes_others = _fields_of_function(plugin)
    config = ConfigDict(
        extra="allow" if takes_others else "forbid", strict=True, allow_inf_nan=False, protected_namespaces=(),
        arbitrary_types_allowed=True,
    )  # fmt: skip
    name = getattr(plugin, "__name__", type(plugin).__name__)
    return create_model(f"{name} parameters", __config__=config, **fields)


def _fields_of_params(params: Any) -> dict[str, Any]:
    hints, fields = get_type_hints(params), {}
    for field in dataclasses.fields(params):
        assert field.name != "name", f"{params.__qualname__}: 'name' is the key that picks the method"
        default: dict[str, Any] = {}
        if field.default is not dataclasses.MISSING:
            default["default"] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default["default_factory"] = field.default_factory
        fields[field.name] = _field(hints[field.name], default, dict(field.metadata))
    return fields


def _fields_of_function(function: Any) -> tuple[dict[str, Any], bool]:
    """Return the fields, and whether the function takes any further key."""
    namespace = getattr(inspect.unwrap(function), "__globals__", {})
    fields, takes_others = {}, False
    for name, parameter in list(inspect.signature(function).parameters.items())[1:]:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(f"parameter '{name}' cannot be given by name; remove the '/' after it")
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            takes_others |= parameter.kind is parameter.VAR_KEYWORD
            continue
        annotation = _resolved(parameter.annotation, namespace)
        knobs = [
            extra for extra in getattr(annotation, "__metadata__", ()) if hasattr(extra, "bounds")
        ]  # of algs.method.Knob
        metadata = {"help": knobs[0].help, **knobs[0].bounds} if knobs else {}
        default = {} if parameter.default is parameter.empty else {"default": parameter.default}
        fields[name] = _field(annotation, default, metadata)
    return fields, takes_others


def _resolved(annotation: Any, namespace: dict[str, Any]) -> Any:
    """Return the type that an annotation means; Any for none, or for a name imported for type checkers only."""
    if annotation is inspect.Parameter.empty:
        return Any
    holder = SimpleNamespace(__annotations__={"it": annotation})
    try:
        return get_type_hints(holder, namespace, include_extras=True)["it"]
    except NameError:  # imported for type checkers only
        return Any


def _field(annotation: Any, default: dict[str, Any], metadata: dict[str, Any]) -> Any:
    stated = {key: value for key, value in metadata.items() if key in BOUNDS}
    if "help" in metadata:
        stated["description"] = metadata["help"]
    plain = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    if get_origin(plain) in (tuple, set, frozenset):
        stated["strict"] = False  # YAML has lists only
    return annotation, Field(**default, **stated)
