"""From the parameters of a method or a function to a pydantic model that checks, fills in and documents them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import InitErrorDetails, PydanticCustomError

if TYPE_CHECKING:
    from algs.method import PolicyMethod

BOUNDS = ("ge", "gt", "le", "lt")
CLOSED = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


def model_of_method(method: type[PolicyMethod]) -> type[BaseModel]:
    """A pydantic model with the fields, bounds and help of the method's `Params`."""
    params: Any = method.Params  # a dataclass, which its base class does not tell the type checker
    hints = get_type_hints(params)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(params):
        assert field.name != "name", f"{method.__name__}.Params: 'name' is the key that picks the method"
        default: dict[str, Any] = {}
        if field.default is not dataclasses.MISSING:
            default["default"] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default["default_factory"] = field.default_factory
        fields[field.name] = _field(hints[field.name], default, dict(field.metadata))
    return create_model(f"{method.__name__} parameters", __config__=CLOSED, **fields)


def model_of_function(function: Callable[..., Any]) -> type[BaseModel]:
    """A pydantic model with a function's parameters after the first; bounds and help come from `knob`.

    Raises:
        ValueError: a parameter has no name of its own (`*args`, `**kwargs`), or an annotation cannot be read.
    """
    from algs.method import Knob
    from plugins.objective_parts import hints

    annotations = hints(function)
    fields: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(function).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(f"{function.__name__}: parameter '{name}' cannot be given by name; write each one out")
        annotation = annotations.get(name, Any)
        knobs = [extra for extra in getattr(annotation, "__metadata__", ()) if isinstance(extra, Knob)]
        metadata = {"help": knobs[0].help, **knobs[0].bounds} if knobs else {}
        default = {} if parameter.default is parameter.empty else {"default": parameter.default}
        fields[name] = _field(annotation, default, metadata)
    return create_model(f"{function.__name__} parameters", __config__=CLOSED, **fields)


def _field(annotation: Any, default: dict[str, Any], metadata: dict[str, Any]) -> Any:
    stated = {key: value for key, value in metadata.items() if key in BOUNDS}
    if "help" in metadata:
        stated["description"] = metadata["help"]
    plain = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    if get_origin(plain) in (tuple, set, frozenset):
        stated["strict"] = False  # YAML has lists only
    return annotation, Field(**default, **stated)


def error_at(key: str, text: str, given: Any) -> ValidationError:
    """A problem of one key, to be raised from a validator of the block it stands in."""
    error = PydanticCustomError("rule", "{text}", {"text": text})
    return ValidationError.from_exception_data("block", [InitErrorDetails(type=error, loc=(key,), input=given)])
